// SPDX-License-Identifier: MIT
// A loop of independent fp32 multiply-adds in registers: the ceiling that gdn_measure_peak reports for this ISA.
#include "cpu/isa/kernels.h"
#include "cpu/isa/simd-inl.h"

namespace gdn::cpu::GDN_ISA_NS {

double fma_loop(int64_t iterations, float seed) {
  const F32Tag d;
  // Twelve chains cover latency 4-5 at two per cycle on every core of this decade; contraction towards a fixed point
  // keeps values normal.
  const F32Vec m = hn::Set(d, 0.5f + seed), c = hn::Set(d, 0.25f);
  // Every chain starts elsewhere (seed is a run-time value), or the compiler would compute one and call it twelve.
  const F32Vec s0 = hn::Set(d, seed);
  F32Vec a0 = s0, a1 = hn::Add(a0, s0), a2 = hn::Add(a1, s0), a3 = hn::Add(a2, s0), a4 = hn::Add(a3, s0),
         a5 = hn::Add(a4, s0), a6 = hn::Add(a5, s0), a7 = hn::Add(a6, s0), a8 = hn::Add(a7, s0), a9 = hn::Add(a8, s0),
         a10 = hn::Add(a9, s0), a11 = hn::Add(a10, s0);
  for (int64_t i = 0; i < iterations; ++i) {
    a0 = hn::MulAdd(a0, m, c);
    a1 = hn::MulAdd(a1, m, c);
    a2 = hn::MulAdd(a2, m, c);
    a3 = hn::MulAdd(a3, m, c);
    a4 = hn::MulAdd(a4, m, c);
    a5 = hn::MulAdd(a5, m, c);
    a6 = hn::MulAdd(a6, m, c);
    a7 = hn::MulAdd(a7, m, c);
    a8 = hn::MulAdd(a8, m, c);
    a9 = hn::MulAdd(a9, m, c);
    a10 = hn::MulAdd(a10, m, c);
    a11 = hn::MulAdd(a11, m, c);
  }
  const F32Vec s =
      hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)),
              hn::Add(hn::Add(hn::Add(a4, a5), hn::Add(a6, a7)), hn::Add(hn::Add(a8, a9), hn::Add(a10, a11))));
  return static_cast<double>(hn::GetLane(s));
}
int64_t fma_loop_flop() { return 12 * 2 * kLanes; }

}  // namespace gdn::cpu::GDN_ISA_NS
