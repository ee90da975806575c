// SPDX-License-Identifier: MIT
// The C ABI: translate and catch, nothing else. (gdn_measure_peak is in peak.cpp.)
#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "c_abi/last_error.h"
#include "core/explain.h"
#include "core/impl_list.h"
#include "core/validate.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cpu/rule.h"
#include "cuda/cuda.h"
#include "gdn/gdn.h"

namespace gdn {
namespace {

constexpr size_t kMaxMessage = 2048;
thread_local char tl_last_error[kMaxMessage] = "";

// Problems keep the capacity of their vectors: a warm thread validates without allocating.
thread_local RuleProblem tl_rule;
thread_local ConvProblem tl_conv;

template <class F>
gdn_status guarded(const char* function, F&& body) noexcept {
  const auto failed = [&](gdn_status code, const char* what) {
    char message[kMaxMessage] = "";
    std::strncat(message, function, 64);
    std::strncat(message, ": ", 3);
    std::strncat(message, what, kMaxMessage - 128);
    return set_last_error(code, message);
  };
  try {
    const Status status = body();
    return status.ok() ? static_cast<gdn_status>(GDN_OK) : set_last_error(status.code(), status.message().c_str());
  } catch (const std::bad_alloc&) {
    return failed(GDN_OUT_OF_MEMORY, "memory could not be allocated");
  } catch (const std::exception& error) {
    return failed(GDN_INTERNAL, error.what());
  } catch (...) {
    return failed(GDN_INTERNAL, "unknown error");
  }
}

// Nothing to write: no token in any sequence, and no state that a sequence without tokens would still get.
// On the device only shapes tell: a sequence without tokens still gets its final state.
bool is_empty(const RuleProblem& p) {
  if (p.on_cuda()) return p.N == 0 || (p.T == 0 && !p.final_state.present());
  for (const Sequence& seq : p.seqs) {
    if (seq.len > 0 || seq.write_slot >= 0) return false;
  }
  return true;
}
bool is_empty(const ConvProblem& p) {
  if (p.on_cuda()) return p.N == 0 || (p.T == 0 && !p.final_state.present());
  for (const Sequence& seq : p.seqs) {
    if (seq.len > 0 || seq.write_slot >= 0) return false;
  }
  return true;
}
bool is_empty(const GateProblem& p) { return p.rows[0] == 0 || p.rows[1] == 0 || p.rows[2] == 0; }
bool is_empty(const NormProblem& p) { return p.rows[0] == 0 || p.rows[1] == 0 || p.rows[2] == 0; }
bool is_empty(const RopeProblem& p) { return p.B == 0 || p.T == 0; }

const char* impl_name(const gdn_rule_args* args) {
  return args->impl;  // part of the first published struct, so always there once validated
}

// Rows of o that belong to no sequence; a batch without cu_seqlens has none.
void zero_tail(const RuleProblem& p) {
  for (int64_t t = p.seqs.empty() ? 0 : p.seqs.back().begin + p.seqs.back().len; t < p.T; ++t) {
    for (int64_t h = 0; h < p.Hv; ++h) {
      for (int64_t j = 0; j < p.V; ++j) std::memset(p.o.at(0, t, h, j), 0, static_cast<size_t>(dtype_bytes(p.o.dtype)));
    }
  }
}

gdn_status run_rule(int32_t op, const char* function, const gdn_rule_args* args) {
  return guarded(function, [&] {
    RuleProblem& problem = tl_rule;
    Status status = validate(op, args, false, &problem);
    if (!status.ok()) return status;
    const Implementation* impl = nullptr;
    Plan plan;
    status = choose(problem, impl_name(args), &impl, &plan);
    if (!status.ok()) return status;
    if (!is_empty(problem)) status = impl->run(problem, plan);
    if (!status.ok() || !problem.zero_tail) return status;
    if (problem.on_cuda()) return cuda::run_zero_tail(problem);
    zero_tail(problem);
    return status;
  });
}

Status workspace_of(const gdn_rule_args* args, int64_t* bytes) {
  if (bytes == nullptr) {
    return Status(GDN_INVALID_ARGUMENT,
                  "chunk_forward_workspace: argument 'bytes': found NULL, expected a place for the result");
  }
  RuleProblem& problem = tl_rule;
  Status status = validate(GDN_OP_CHUNK_FORWARD, args, true, &problem);
  if (!status.ok()) return status;
  const Implementation* impl = nullptr;
  Plan plan;
  status = choose(problem, impl_name(args), &impl, &plan);
  if (status.ok()) *bytes = problem.on_cuda() && !is_empty(problem) ? plan.scratch_bytes : 0;
  return status;
}

template <class Problem>
struct Runs {
  Status (*on_cpu)(const Problem&);
  Status (*on_cuda)(const Problem&);
};
#if defined(GDN_HAVE_CUDA)
#define GDN_RUNS(name) \
  { gdn::cpu::name, gdn::cuda::name }
#else
#define GDN_RUNS(name) \
  { gdn::cpu::name, nullptr }  // validation refuses CUDA tensors
#endif

template <class Args, class Problem>
gdn_status run_op(const char* function, const Args* args, Problem* problem, const Runs<Problem>& runs) {
  return guarded(function, [&] {
    Status status = validate(args, problem);
    if (!status.ok() || is_empty(*problem)) return status;
    return problem->on_cuda() ? runs.on_cuda(*problem) : runs.on_cpu(*problem);
  });
}

Status copy_text(const char* function, const std::string& text, char* json, size_t size, size_t* needed) {
  if (needed != nullptr) *needed = text.size() + 1;
  if (size == 0) return Status();
  if (json == nullptr) {
    return Status(GDN_INVALID_ARGUMENT, std::string(function) + ": argument 'json': found NULL with size " +
                                            std::to_string(size) + ", expected a buffer, or size 0");
  }
  const size_t length = std::min(text.size(), size - 1);
  std::memcpy(json, text.data(), length);
  json[length] = '\0';
  return Status();
}

}  // namespace

gdn_status set_last_error(gdn_status code, const char* message) noexcept {
  const size_t length = std::min(std::strlen(message), kMaxMessage - 1);
  std::memcpy(tl_last_error, message, length);
  tl_last_error[length] = '\0';
  return code;
}

}  // namespace gdn

extern "C" {

const char* gdn_last_error(void) { return gdn::tl_last_error; }

const char* gdn_status_string(gdn_status status) {
  switch (status) {
    case GDN_OK:
      return "ok";
    case GDN_INVALID_ARGUMENT:
      return "invalid argument";
    case GDN_UNSUPPORTED:
      return "unsupported";
    case GDN_OUT_OF_MEMORY:
      return "out of memory";
    case GDN_INTERNAL:
      return "internal error";
    default:
      return "unknown status";
  }
}

const char* gdn_version(void) { return GDN_VERSION_STRING; }

int32_t gdn_abi_version(void) { return GDN_ABI_VERSION; }

gdn_status gdn_chunk_forward(const gdn_rule_args* args) {
  return gdn::run_rule(GDN_OP_CHUNK_FORWARD, "chunk_forward", args);
}

gdn_status gdn_chunk_forward_workspace(const gdn_rule_args* args, int64_t* bytes) {
  return gdn::guarded("chunk_forward_workspace", [&] { return gdn::workspace_of(args, bytes); });
}

gdn_status gdn_recurrent(const gdn_rule_args* args) { return gdn::run_rule(GDN_OP_RECURRENT, "recurrent", args); }

gdn_status gdn_causal_conv1d(const gdn_conv1d_args* args) {
  return gdn::run_op("causal_conv1d", args, &gdn::tl_conv, gdn::Runs<gdn::ConvProblem> GDN_RUNS(run_conv1d));
}

gdn_status gdn_gate(const gdn_gate_args* args) {
  gdn::GateProblem problem;
  return gdn::run_op("gate", args, &problem, gdn::Runs<gdn::GateProblem> GDN_RUNS(run_gate));
}

gdn_status gdn_rmsnorm_gated(const gdn_rmsnorm_gated_args* args) {
  gdn::NormProblem problem;
  return gdn::run_op("rmsnorm_gated", args, &problem, gdn::Runs<gdn::NormProblem> GDN_RUNS(run_norm));
}

gdn_status gdn_glu(const gdn_glu_args* args) {
  gdn::NormProblem problem;
  return gdn::run_op("glu", args, &problem, gdn::Runs<gdn::NormProblem> GDN_RUNS(run_norm));
}

gdn_status gdn_qk_rmsnorm_rope(const gdn_qk_rmsnorm_rope_args* args) {
  gdn::RopeProblem problem;
  return gdn::run_op("qk_rmsnorm_rope", args, &problem, gdn::Runs<gdn::RopeProblem> GDN_RUNS(run_rope));
}

gdn_status gdn_explain(int32_t op, const gdn_rule_args* args, char* json, size_t size, size_t* needed) {
  return gdn::guarded("explain", [&] {
    std::string text;
    const gdn::Status status = gdn::explain(op, args, &text);
    return status.ok() ? gdn::copy_text("explain", text, json, size, needed) : status;
  });
}

gdn_status gdn_info(char* json, size_t size, size_t* needed) {
  return gdn::guarded("info", [&] {
    std::string text;
    gdn::describe_library(&text);
    return gdn::copy_text("info", text, json, size, needed);
  });
}

gdn_status gdn_set_num_threads(int32_t n) {
  if (n < 0) {
    return gdn::set_last_error(
        GDN_INVALID_ARGUMENT,
        "set_num_threads: argument 'n': found a negative number, expected >= 1, or 0 for the default");
  }
  gdn::cpu::set_default_threads(n);
  return GDN_OK;
}

int32_t gdn_get_num_threads(void) { return gdn::cpu::effective_threads(0); }

gdn_status gdn_set_isa(const char* name) {
  return gdn::guarded("set_isa", [&] {
    constexpr const char* kExpected = "', expected auto, amx, avx512, avx2, neon or baseline";
    if (name == nullptr) {
      return gdn::Status(GDN_INVALID_ARGUMENT, std::string("set_isa: argument 'name': found 'NULL") + kExpected);
    }
    const char* why_not = nullptr;
    if (gdn::cpu::set_isa_cap(name, &why_not)) return gdn::Status();
    const bool unknown = std::strcmp(why_not, "unknown ISA") == 0;
    return gdn::Status(unknown ? GDN_INVALID_ARGUMENT : GDN_UNSUPPORTED,
                       std::string("set_isa: argument 'name': found '") + name +
                           (unknown ? kExpected : std::string("', expected an ISA this machine has: ") + why_not));
  });
}

const char* gdn_get_isa(void) { return gdn::cpu::isa_name(gdn::cpu::active_isa()); }

gdn_status gdn_release_memory(void) {
  gdn::cpu::release_scratch();
  gdn::cuda::release_memory();
  return GDN_OK;
}

}  // extern "C"
