// SPDX-License-Identifier: MIT
#include "core/explain.h"

#include <cstdio>
#include <cstring>
#include <fstream>
#include <thread>

#include "core/impl_list.h"
#include "core/validate.h"
#include "core/validate_util.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cuda/cuda.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if !defined(GDN_GIT_COMMIT)
#define GDN_GIT_COMMIT "unknown"
#endif

namespace gdn {
namespace {

// A JSON object or array under construction: members in the order they are added.
class Json {
 public:
  static Json object() { return Json('{', '}'); }
  static Json array() { return Json('[', ']'); }

  Json& text(const char* key, const std::string& value) { return raw(key, quote(value)); }
  Json& null(const char* key) { return raw(key, "null"); }
  Json& number(const char* key, int64_t value) { return raw(key, std::to_string(value)); }
  Json& boolean(const char* key, bool value) { return raw(key, value ? "true" : "false"); }
  Json& real(const char* key, double value) {
    char buffer[40];
    std::snprintf(buffer, sizeof(buffer), "%.9g", value);
    return raw(key, buffer);
  }
  Json& raw(const char* key, const std::string& value) {
    if (body_.size() > 1) body_ += ", ";
    if (key != nullptr) body_ += quote(key) + ": ";
    body_ += value;
    return *this;
  }
  std::string str() const { return body_ + close_; }

 private:
  Json(char open, char close) : body_(1, open), close_(close) {}

  static std::string quote(const std::string& value) {
    std::string out = "\"";
    for (const char c : value) {
      if (c == '"' || c == '\\') {
        out += '\\';
        out += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char buffer[8];
        std::snprintf(buffer, sizeof(buffer), "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
        out += buffer;
      } else {
        out += c;
      }
    }
    return out + "\"";
  }

  std::string body_;
  char close_;
};

const char* dtype_name(const View& view) {
  if (!view.present()) return "none";
  switch (view.dtype) {
    case GDN_BF16:
      return "bf16";
    case GDN_F16:
      return "fp16";
    case GDN_F64:
      return "fp64";
    default:
      return "fp32";
  }
}

std::string problem_json(const RuleProblem& p) {
  int64_t tokens = 0, longest = 0, nulls = 0;
  for (const Sequence& seq : p.seqs) {
    tokens += seq.len;
    longest = seq.len > longest ? seq.len : longest;
    nulls += seq.is_null ? 1 : 0;
  }
  Json json = Json::object();
  json.text("device", p.on_cuda() ? "cuda:" + std::to_string(p.device_id) : "cpu").number("sequences", p.N);
  if (p.on_cuda()) {
    json.number("tokens", p.B * p.T);  // room: the lengths lie on the device
    if (p.max_seqlen > 0) json.number("longest_sequence", p.max_seqlen);
  } else {
    json.number("tokens", tokens).number("longest_sequence", longest).number("null_sequences", nulls);
  }
  json.number("key_heads", p.Hk).number("value_heads", p.Hv).number("key_dim", p.K).number("value_dim", p.V);
  json.text("q_dtype", dtype_name(p.q)).text("v_dtype", dtype_name(p.v)).text("o_dtype", dtype_name(p.o));
  json.text("initial_state_dtype", dtype_name(p.initial_state)).text("final_state_dtype", dtype_name(p.final_state));
  json.real("scale", p.scale).boolean("batch_invariant", p.batch_invariant);
  if (p.op == GDN_OP_CHUNK_FORWARD) {
    json.boolean("split_exact", p.split_exact).real("split_threshold", static_cast<double>(p.split_threshold));
  }
  return json.str();
}

// What the plan does about splitting, and why.
std::string split_text(const RuleProblem& p, const Plan& plan) {
  if (plan.split_tokens > 0) {
    return "segments of " + std::to_string(plan.split_tokens) + " tokens" +
           (p.split_tokens > 0           ? " as asked"
            : plan.split_note[0] != '\0' ? std::string(": ") + plan.split_note
                                         : "");
  }
  if (p.split == GDN_SPLIT_OFF) {
    const int64_t pairs = validation::split_pairs();
    if (p.split_tokens > 0) return "off: no sequence is longer than a segment";
    if (p.batch_invariant) return "off: asked, or batch_invariant without split_tokens";
    if (p.N > pairs / p.Hv) return "off: more than " + std::to_string(pairs) + " pairs of sequence and head";
    return "off";
  }
  return plan.split_note[0] != '\0' ? plan.split_note : std::string("off: ") + plan.impl + " does not split";
}

bool has_addresses(const RuleProblem& p) {
  return p.q.data != nullptr && p.k.data != nullptr && p.v.data != nullptr && p.o.data != nullptr;
}

std::string cuda_devices_json() {
  Json devices = Json::array();
  for (int32_t id = 0; id < cuda::device_count(); ++id) {
    const cuda::DeviceInfo info = cuda::device_info(id);
    Json device = Json::object();
    device.number("id", id).text("name", info.name).number("major", info.major).number("minor", info.minor);
    device.number("sms", info.sms).number("clock_khz", info.clock_khz).number("memory_bytes", info.memory_bytes);
    device.number("l2_bytes", info.l2_bytes).number("smem_per_block", info.smem_per_block);
    device.boolean("usable", info.has_code).text("bad_metadata", cuda::error_flags_text(cuda::error_flags(id)));
    if (cuda::counts_splits()) {
      const cuda::SplitCounters counters = cuda::split_counters(id);
      Json split = Json::object();
      split.number("windows", counters.windows).number("window_chunks", counters.window_chunks);
      split.number("exact", counters.exact).number("transitions", counters.transitions);
      device.raw("split_counters", split.str());
    }
    devices.raw(nullptr, device.str());
  }
  return devices.str();
}

std::string cpu_name() {
#if defined(__x86_64__)
  unsigned regs[12] = {};
  unsigned highest = __get_cpuid_max(0x80000000u, nullptr);
  if (highest >= 0x80000004u) {
    for (unsigned i = 0; i < 3; ++i) {
      __get_cpuid(0x80000002u + i, &regs[4 * i], &regs[4 * i + 1], &regs[4 * i + 2], &regs[4 * i + 3]);
    }
    char brand[sizeof(regs) + 1] = {};
    std::memcpy(brand, regs, sizeof(regs));
    std::string name = brand;
    const size_t begin = name.find_first_not_of(' ');
    const size_t end = name.find_last_not_of(' ');
    if (begin != std::string::npos) return name.substr(begin, end - begin + 1);
  }
#endif
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0 || line.rfind("Model", 0) == 0) {
      const size_t at = line.find(": ");
      if (at != std::string::npos) return line.substr(at + 2);
    }
  }
  return "unknown";
}

std::string compiler_name() {
#if defined(__clang__)
  return std::string("clang ") + __clang_version__;
#elif defined(__GNUC__)
  return std::string("gcc ") + __VERSION__;
#else
  return "unknown";
#endif
}

}  // namespace

Status explain(int32_t op, const gdn_rule_args* args, std::string* out) {
  if (op != GDN_OP_CHUNK_FORWARD && op != GDN_OP_RECURRENT) {
    return Status(GDN_INVALID_ARGUMENT, "explain: argument 'op': found " + std::to_string(op) +
                                            ", expected GDN_OP_CHUNK_FORWARD (0) or GDN_OP_RECURRENT (1)");
  }
  RuleProblem problem;
  Status status = validate(op, args, true, &problem);
  if (!status.ok()) return status;
  const Implementation* impl = nullptr;
  Plan plan;
  status = choose(problem, args->impl, &impl, &plan);
  if (status.code() == GDN_INVALID_ARGUMENT) return status;  // no such name

  Json json = Json::object();
  json.text("op", op == GDN_OP_RECURRENT ? "recurrent" : "chunk_forward");
  if (impl != nullptr) {
    json.text("impl", plan.impl).text("isa", plan.isa).number("threads", plan.threads);
    json.number("work_items", plan.work_items).number("panel_v", plan.panel_v);
    json.number("block_tokens", plan.block_tokens).number("scratch_bytes", plan.scratch_bytes);
    if (op == GDN_OP_CHUNK_FORWARD) {
      json.number("split_tokens", plan.split_tokens).text("split", split_text(problem, plan));
      json.number("shares", plan.shares).number("together", plan.together);
    }
    if (impl->options != nullptr) {
      Json options = Json::array();
      for (const PlanOption& option : impl->options(problem)) {
        Json entry = Json::object();
        entry.number("panel_v", option.panel_v).number("split_tokens", option.split_tokens);
        entry.number("shares", option.shares);
        entry.real("predicted_us", option.micros);
        options.raw(nullptr, entry.str());
      }
      json.raw("options", options.str());
    }
    if (impl->model != nullptr) {
      Json model = Json::object();
      for (const ModelValue& entry : impl->model(problem, plan)) model.real(entry.name, entry.value);
      json.raw("model", model.str());
    }
    if (impl->without_addresses != nullptr && !has_addresses(problem)) json.text("condition", impl->without_addresses);
  } else {
    json.null("impl").text("error", status.message());
  }
  json.raw("problem", problem_json(problem));
  Json candidates = Json::array();
  for (const Implementation& candidate : implementations()) {
    if (!is_candidate(candidate, problem)) continue;
    const char* reason = candidate.refuses(problem);
    Json entry = Json::object();
    entry.text("impl", candidate.name).text("isa", candidate.isa).boolean("accepted", reason == nullptr);
    if (reason == nullptr) {
      entry.null("reason");
      if (candidate.without_addresses != nullptr && !has_addresses(problem)) {
        entry.text("condition", candidate.without_addresses);
      }
    } else {
      entry.text("reason", reason);
    }
    candidates.raw(nullptr, entry.str());
  }
  json.raw("candidates", candidates.str());
  *out = json.str();
  return Status();
}

void describe_library(std::string* out) {
  using cpu::Isa;
  Json compiled = Json::array(), usable = Json::array();
  for (const Isa isa : {Isa::kBaseline, Isa::kNeon, Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) {
    const std::string name = std::string("\"") + cpu::isa_name(isa) + "\"";
    if (cpu::isa_compiled(isa)) compiled.raw(nullptr, name);
    if (cpu::isa_usable(isa)) usable.raw(nullptr, name);
  }
  Json build = Json::object();
  build.text("compiler", compiler_name()).text("git", GDN_GIT_COMMIT).boolean("cuda", cuda::kBuilt);
  build.text("cuda_architectures", cuda::architectures());
#if defined(NDEBUG)
  build.boolean("assertions", false);
#else
  build.boolean("assertions", true);
#endif
  Json isas = Json::object();
  isas.raw("compiled", compiled.str()).raw("usable", usable.str()).text("active", cpu::isa_name(cpu::active_isa()));
  Json json = Json::object();
  json.text("version", GDN_VERSION_STRING).number("abi", GDN_ABI_VERSION).raw("build", build.str());
  json.text("cpu", cpu_name()).number("cores", static_cast<int64_t>(std::thread::hardware_concurrency()));
  json.raw("isa", isas.str()).number("threads", cpu::effective_threads(0)).raw("cuda_devices", cuda_devices_json());
  if (cuda::kBuilt && cuda::device_count() == 0) json.text("cuda_unavailable", cuda::no_device_reason());
  *out = json.str();
}

}  // namespace gdn
