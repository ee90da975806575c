// SPDX-License-Identifier: MIT
// Sequences and their slots from the metadata on the host; switches in the environment.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/validate_util.h"

namespace gdn::validation {
namespace {

__extension__ typedef __int128 Wide;

std::string number(int64_t value) { return std::to_string(value); }

}  // namespace

bool debug_checks() {
  static const bool on = [] {
    const char* text = std::getenv("GDN_CHECK");
    return text != nullptr && std::strcmp(text, "0") != 0 && text[0] != '\0';
  }();
  return on;
}

int64_t split_pairs() {
  static const int64_t pairs = [] {
    constexpr int64_t kDefault = 64;
    const char* text = std::getenv("GDN_SPLIT_PAIRS");
    if (text == nullptr) return kDefault;
    char* end = nullptr;
    errno = 0;
    const long long value = std::strtoll(text, &end, 10);
    if (end != text && *end == '\0' && errno == 0 && value >= 0) return static_cast<int64_t>(value);
    std::fprintf(stderr,
                 "libgdn: environment variable GDN_SPLIT_PAIRS: found '%s', expected a number >= 0; using %lld\n", text,
                 static_cast<long long>(kDefault));
    return kDefault;
  }();
  return pairs;
}

int64_t duplicate_slot(std::vector<int64_t>* slots) {
  std::sort(slots->begin(), slots->end());
  for (size_t i = 1; i < slots->size(); ++i) {
    if ((*slots)[i] >= 0 && (*slots)[i] == (*slots)[i - 1]) return (*slots)[i];
  }
  return -1;
}

bool count_sequences(Checker* check, const View& cu, int64_t batch, int64_t* count) {
  const int64_t n_seqs = cu.present() ? cu.shape[0] - 1 : batch;
  if (cu.present()) {
    if (n_seqs < 0) return check->invalid("cu_seqlens", "shape [0]", "[N + 1] with N >= 0");
    if (batch != 1) {
      return check->invalid("cu_seqlens", "batch size B = " + number(batch) + " beside cu_seqlens", "B = 1");
    }
  }
  if (n_seqs > kMaxSequences) {
    return check->unsupported(cu.present() ? "cu_seqlens" : "B", number(n_seqs) + " sequences",
                              "at most " + number(kMaxSequences) + " in one call");
  }
  *count = n_seqs;
  return true;
}

bool build_sequences(Checker* check, const View& cu, int64_t batch, int64_t tokens, std::vector<Sequence>* seqs) {
  int64_t n_seqs = 0;
  if (!count_sequences(check, cu, batch, &n_seqs)) return false;
  seqs->resize(static_cast<size_t>(n_seqs));
  if (!cu.present()) {
    for (int64_t n = 0; n < n_seqs; ++n) (*seqs)[static_cast<size_t>(n)] = Sequence{n, 0, tokens};
    return true;
  }
  const bool known = cu.data != nullptr;
  int64_t begin = known ? read_index(cu, 0) : 0;
  if (begin != 0) return check->invalid("cu_seqlens", "cu_seqlens[0] = " + number(begin), "0");
  for (int64_t n = 0; n < n_seqs; ++n) {
    // A plan without data takes sequences of even lengths.
    const int64_t end =
        known ? read_index(cu, n + 1) : static_cast<int64_t>(static_cast<Wide>(tokens) * (n + 1) / n_seqs);
    if (end < begin) {
      return check->invalid("cu_seqlens",
                            "cu_seqlens[" + number(n + 1) + "] = " + number(end) + " after " + number(begin),
                            "non-decreasing values");
    }
    if (end > tokens) {
      return check->invalid("cu_seqlens", "cu_seqlens[" + number(n + 1) + "] = " + number(end),
                            "at most T = " + number(tokens));
    }
    (*seqs)[static_cast<size_t>(n)] = Sequence{0, begin, end - begin};
    begin = end;
  }
  return true;
}

bool is_null_slot(int64_t slot, int32_t null_slots) {
  return null_slots == GDN_NULL_NON_POSITIVE ? slot <= 0 : slot < 0;
}

namespace {

// Slot of sequence n: indices[n], or row n. False when out of range; *null is set for a null slot.
bool slot_of(Checker* check, const char* argument, const View& indices, const View& state, int64_t n,
             int32_t null_slots, int64_t* slot, bool* null) {
  if (!indices.present()) {
    *slot = n;
    return n < state.shape[0] ||
           check->invalid(argument, "NULL with " + number(state.shape[0]) + " rows of the state", "a row per sequence");
  }
  *slot = indices.data != nullptr ? read_index(indices, n) : std::min(n, state.shape[0] - 1);
  if (is_null_slot(*slot, null_slots)) {
    *null = true;
    return true;
  }
  if (*slot < state.shape[0]) return true;
  return check->invalid(argument, std::string(argument) + "[" + number(n) + "] = " + number(*slot),
                        "a slot below " + number(state.shape[0]) + ", or a null slot");
}

}  // namespace

bool build_slots(Checker* check, const SlotArguments& args, std::vector<Sequence>* seqs) {
  const View& initial = *args.initial_state;
  const View& final = *args.final_state;
  const bool shared = !args.final_indices->present() && same_view(initial, final);
  const View& final_indices = shared ? *args.initial_indices : *args.final_indices;
  for (size_t i = 0; i < seqs->size(); ++i) {
    Sequence& seq = (*seqs)[i];
    const int64_t n = static_cast<int64_t>(i);
    if (initial.present()) {
      if (!slot_of(check, "initial_state_indices", *args.initial_indices, initial, n, args.null_slots, &seq.read_slot,
                   &seq.is_null)) {
        return false;
      }
      if (args.has_initial->present() && args.has_initial->data != nullptr && read_index(*args.has_initial, n) == 0) {
        seq.read_slot = -1;
      }
    }
    if (final.present() && !slot_of(check, shared ? "initial_state_indices" : "final_state_indices", final_indices,
                                    final, n, args.null_slots, &seq.write_slot, &seq.is_null)) {
      return false;
    }
    if (seq.is_null) seq.read_slot = seq.write_slot = -1;
  }
  if (debug_checks() && final_indices.present() && final.present()) {
    std::vector<int64_t> slots;
    for (const Sequence& seq : *seqs) slots.push_back(seq.write_slot);
    const int64_t twice = duplicate_slot(&slots);
    if (twice >= 0) {
      return check->invalid(shared ? "initial_state_indices" : "final_state_indices",
                            "slot " + number(twice) + " written by two sequences", "distinct slots (GDN_CHECK)");
    }
  }
  return true;
}

}  // namespace gdn::validation
