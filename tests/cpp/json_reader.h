// SPDX-License-Identifier: MIT
// The part of JSON that cases.json uses: objects, arrays, strings without escapes beyond \", numbers, booleans.
#pragma once
#include <cctype>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace gdn_test {

struct Json {
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject } kind = Kind::kNull;
  double number = 0;  // also 0 and 1 for booleans
  std::string text;
  std::vector<Json> items;
  std::map<std::string, Json> fields;

  bool present() const { return kind != Kind::kNull; }
  const Json& at(const std::string& name) const {
    static const Json absent;
    const auto found = fields.find(name);
    return found == fields.end() ? absent : found->second;
  }
  std::vector<int64_t> integers() const {
    std::vector<int64_t> out;
    for (const Json& item : items) out.push_back(static_cast<int64_t>(item.number));
    return out;
  }
};

class JsonReader {
 public:
  explicit JsonReader(std::string text) : text_(std::move(text)) {}
  Json read() {
    Json value = parse();
    if (peek() != '\0') fail("the end");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& expected) const {
    throw std::runtime_error("cases.json: byte " + std::to_string(at_) + ": expected " + expected);
  }
  char peek() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  std::string string() {
    std::string out;
    if (!take('"')) fail("a string");
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] == '\\') ++at_;
      if (at_ < text_.size()) out += text_[at_++];
    }
    if (!take('"')) fail("a closing quote");
    return out;
  }
  Json parse() {
    Json value;
    const char c = peek();
    if (c == '{') {
      value.kind = Json::Kind::kObject;
      ++at_;
      while (!take('}')) {
        const std::string name = string();
        if (!take(':')) fail("':'");
        value.fields[name] = parse();
        if (!take(',') && peek() != '}') fail("',' or '}'");
      }
    } else if (c == '[') {
      value.kind = Json::Kind::kArray;
      ++at_;
      while (!take(']')) {
        value.items.push_back(parse());
        if (!take(',') && peek() != ']') fail("',' or ']'");
      }
    } else if (c == '"') {
      value.kind = Json::Kind::kString;
      value.text = string();
    } else if (text_.compare(at_, 4, "true") == 0 || text_.compare(at_, 5, "false") == 0) {
      value.kind = Json::Kind::kBool;
      value.number = c == 't';
      at_ += c == 't' ? 4 : 5;
    } else {
      value.kind = Json::Kind::kNumber;
      size_t used = 0;
      value.number = std::stod(text_.substr(at_, 40), &used);
      at_ += used;
    }
    return value;
  }

  std::string text_;
  size_t at_ = 0;
};

}  // namespace gdn_test
