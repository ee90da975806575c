// SPDX-License-Identifier: MIT
// The delta rule on the CPU: splitting a problem into items, and the entries of the implementation list.
#pragma once
#include "core/impl_list.h"
#include "cpu/dispatch.h"

namespace gdn::cpu {

// rule.cpp: SIMD implementations of one ISA for the list ("chunk_<isa>", "recurrent_<isa>").
const char* refuse_simd(const RuleProblem& p);
void plan_chunk(const RuleProblem& p, Isa isa, Plan* plan);
Status run_chunk(const RuleProblem& p, Isa isa, const Plan& plan);
void plan_recurrent(const RuleProblem& p, Isa isa, Plan* plan);
Status run_recurrent(const RuleProblem& p, Isa isa, const Plan& plan);

// amx/chunk_amx.cpp: bf16 chunk-64 kernel. refuse_amx checks the problem only (the list checks the CPU).
const char* refuse_amx(const RuleProblem& p);
void plan_amx(const RuleProblem& p, Plan* plan);
Status run_amx(const RuleProblem& p, const Plan& plan);
// The same kernel with every operand but K and Q as a pair of bf16; takes what refuse_amx lets through.
void plan_amx_exact(const RuleProblem& p, Plan* plan);
Status run_amx_exact(const RuleProblem& p, const Plan& plan);

// reference.cpp: token loop in fp32 or fp64; any dtype (F64 too), any stride; both ops with every feature.
const char* refuse_reference(const RuleProblem& p);
void plan_reference(const RuleProblem& p, Plan* plan);
Status run_reference_fp32(const RuleProblem& p, const Plan& plan);
Status run_reference_fp64(const RuleProblem& p, const Plan& plan);

// ops.cpp
Status run_conv1d(const ConvProblem& p);
Status run_gate(const GateProblem& p);
Status run_norm(const NormProblem& p);
Status run_rope(const RopeProblem& p);

}  // namespace gdn::cpu
