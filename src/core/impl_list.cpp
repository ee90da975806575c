// SPDX-License-Identifier: MIT
#include "core/impl_list.h"

#include <cstring>

#include "cpu/rule.h"
#include "cuda/cuda.h"
#if defined(GDN_HAVE_CUDA_SM80)
#include "cuda/sm80/chunk_forward/chunk_forward.h"
#endif
#if defined(GDN_HAVE_CUDA_SM90)
#include "cuda/sm90/chunk_forward/chunk_forward.h"
#endif

namespace gdn {
namespace {

using cpu::Isa;

constexpr int32_t kChunk = GDN_OP_CHUNK_FORWARD;
constexpr int32_t kRecurrent = GDN_OP_RECURRENT;

bool has_f64(const RuleProblem& p) {
  for (const View* v : {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.A_log, &p.dt_bias, &p.o, &p.initial_state, &p.final_state,
                        &p.snapshots, &p.checkpoints}) {
    if (v->present() && v->dtype == GDN_F64) return true;
  }
  return false;
}

template <Isa kIsa>
const char* isa_unavailable() {
  if (!cpu::isa_usable(kIsa)) {
    switch (kIsa) {
      case Isa::kAmx:
        return "this CPU or operating system lacks AMX-BF16";
      case Isa::kAvx512:
        return "this CPU lacks AVX-512 (F, BW, DQ, VL, CD)";
      case Isa::kAvx2:
        return "this CPU lacks AVX2 with FMA and F16C";
      case Isa::kNeon:
        return "this CPU lacks NEON";
      default:
        return "this build lacks it";
    }
  }
  return kIsa > cpu::active_isa() ? "capped by GDN_ISA or gdn_set_isa" : nullptr;
}

template <Isa kIsa>
const char* refuses_simd(const RuleProblem& p) {
  if (const char* reason = isa_unavailable<kIsa>()) return reason;
  if (has_f64(p)) return "takes no F64 tensors";
  return cpu::refuse_simd(p);
}

template <Isa kIsa>
Implementation chunk_entry(const char* name) {
  return {name,
          kChunk,
          GDN_CPU,
          cpu::isa_name(kIsa),
          refuses_simd<kIsa>,
          [](const RuleProblem& p, Plan* plan) { cpu::plan_chunk(p, kIsa, plan); },
          [](const RuleProblem& p, const Plan& plan) { return cpu::run_chunk(p, kIsa, plan); }};
}

template <Isa kIsa>
Implementation recurrent_entry(const char* name) {
  return {name,
          kRecurrent,
          GDN_CPU,
          cpu::isa_name(kIsa),
          refuses_simd<kIsa>,
          [](const RuleProblem& p, Plan* plan) { cpu::plan_recurrent(p, kIsa, plan); },
          [](const RuleProblem& p, const Plan& plan) { return cpu::run_recurrent(p, kIsa, plan); }};
}

const char* refuses_fp32_reference(const RuleProblem& p) {
  return has_f64(p) ? "takes no F64 tensors" : cpu::refuse_reference(p);
}

void add_cuda(std::vector<Implementation>* list) {
#if defined(GDN_HAVE_CUDA_SM90)
  list->push_back(
      {"chunk_sm90", kChunk, GDN_CUDA, "sm90",
       [](const RuleProblem& p) { return has_f64(p) ? "takes no F64 tensors" : cuda::sm90::refuse_chunk(p); },
       cuda::sm90::plan_chunk, cuda::sm90::run_chunk, "if q, k, v and o are 16-byte aligned", cuda::sm90::chunk_options,
       cuda::sm90::chunk_model});
#endif
#if defined(GDN_HAVE_CUDA)
  const auto refuses = [](const RuleProblem& p) { return has_f64(p) ? "takes no F64 tensors" : cuda::refuse_simt(p); };
  list->push_back({"chunk_simt", kChunk, GDN_CUDA, "simt", refuses, cuda::plan_simt, cuda::run_simt});
#if defined(GDN_HAVE_CUDA_SM80)
  // Behind the kernel that takes everything, so by name only: it has not been timed beside it.
  list->push_back(
      {"chunk_sm80", kChunk, GDN_CUDA, "sm80",
       [](const RuleProblem& p) { return has_f64(p) ? "takes no F64 tensors" : cuda::sm80::refuse_chunk(p); },
       cuda::sm80::plan_chunk, cuda::sm80::run_chunk});
#endif
  list->push_back({"recurrent_decode", kRecurrent, GDN_CUDA, "simt",
                   [](const RuleProblem& p) { return has_f64(p) ? "takes no F64 tensors" : cuda::refuse_decode(p); },
                   cuda::plan_decode, cuda::run_decode, "if the states are 16-byte aligned"});
  list->push_back({"recurrent_simt", kRecurrent, GDN_CUDA, "simt", refuses, cuda::plan_simt, cuda::run_simt});
#endif
  (void)list;
}

std::vector<Implementation> build_list() {
  std::vector<Implementation> list;
  add_cuda(&list);
#if defined(GDN_HAVE_AMX)
  const auto refuses_amx = [](const RuleProblem& p) -> const char* {
    if (const char* reason = isa_unavailable<Isa::kAmx>()) return reason;
    return has_f64(p) ? "takes no F64 tensors" : cpu::refuse_amx(p);
  };
  list.push_back({"chunk_amx", kChunk, GDN_CPU, "amx", refuses_amx, cpu::plan_amx, cpu::run_amx});
  // Takes what chunk_amx takes and stands behind it: run by name only.
  list.push_back({"chunk_amx_exact", kChunk, GDN_CPU, "amx", refuses_amx, cpu::plan_amx_exact, cpu::run_amx_exact});
#endif
#if defined(GDN_HAVE_AVX512)
  list.push_back(chunk_entry<Isa::kAvx512>("chunk_avx512"));
  list.push_back(recurrent_entry<Isa::kAvx512>("recurrent_avx512"));
#endif
#if defined(GDN_HAVE_AVX2)
  list.push_back(chunk_entry<Isa::kAvx2>("chunk_avx2"));
  list.push_back(recurrent_entry<Isa::kAvx2>("recurrent_avx2"));
#endif
#if defined(GDN_HAVE_NEON)
  list.push_back(chunk_entry<Isa::kNeon>("chunk_neon"));
  list.push_back(recurrent_entry<Isa::kNeon>("recurrent_neon"));
#endif
#if defined(GDN_HAVE_BASELINE)
  list.push_back(chunk_entry<Isa::kBaseline>("chunk_baseline"));
  list.push_back(recurrent_entry<Isa::kBaseline>("recurrent_baseline"));
#endif
  for (const int32_t op : {kChunk, kRecurrent}) {
    list.push_back(
        {"reference_fp32", op, GDN_CPU, "any", refuses_fp32_reference, cpu::plan_reference, cpu::run_reference_fp32});
    list.push_back(
        {"reference_fp64", op, GDN_CPU, "any", cpu::refuse_reference, cpu::plan_reference, cpu::run_reference_fp64});
  }
  return list;
}

const char* op_name(int32_t op) { return op == kRecurrent ? "recurrent" : "chunk_forward"; }

}  // namespace

const std::vector<Implementation>& implementations() {
  static const std::vector<Implementation> list = build_list();
  return list;
}

Status choose(const RuleProblem& problem, const char* name, const Implementation** impl, Plan* plan) {
  const bool any = name == nullptr || name[0] == '\0' || std::strcmp(name, "auto") == 0;
  bool known = any;
  const char* elsewhere = nullptr;  // why the named one is none for this place
  for (const Implementation& candidate : implementations()) {
    if (candidate.op != problem.op) continue;
    if (!any && std::strcmp(name, candidate.name) != 0) continue;
    known = true;
    if (!is_candidate(candidate, problem)) {
      if (!any) elsewhere = problem.on_cuda() ? "takes CPU tensors" : "takes CUDA tensors";
      continue;
    }
    if (candidate.refuses(problem) != nullptr) continue;
    *impl = &candidate;
    *plan = Plan();
    candidate.make_plan(problem, plan);
    plan->impl = candidate.name;
    plan->isa = candidate.isa;
    return Status();
  }

  const std::string start = std::string(op_name(problem.op)) + ": argument 'impl': found ";
  if (elsewhere != nullptr) {
    const std::string where = problem.on_cuda() ? "on CUDA device " + std::to_string(problem.device_id) : "on the CPU";
    return Status(GDN_UNSUPPORTED, start + "one that refuses, expected one that accepts (" + name + ": " + elsewhere +
                                       "; these are " + where + ")");
  }
  std::string text;
  for (const Implementation& candidate : implementations()) {
    if (!is_candidate(candidate, problem)) continue;
    if (!known) {
      text += std::string(text.empty() ? "" : ", ") + candidate.name;
    } else if (any || std::strcmp(name, candidate.name) == 0) {
      text += std::string(text.empty() ? "" : "; ") + candidate.name + ": " + candidate.refuses(problem);
    }
  }
  if (!known) return Status(GDN_INVALID_ARGUMENT, start + "'" + name + "', expected auto, " + text);
  return Status(GDN_UNSUPPORTED, start + (any ? "no implementation that takes this call" : "one that refuses") +
                                     ", expected one that accepts (" + text + ")");
}

}  // namespace gdn
