// SPDX-License-Identifier: MIT
// State warpgroup: 64 value channels of X = S^T in registers for the whole sequence, output tile by tile.
#pragma once
#include <climits>

#include "cuda/common/sequence.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldst.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk_forward/aux_role.cuh"
#include "cuda/sm90/chunk_forward/config.h"
#include "cuda/sm90/chunk_forward/segments.cuh"

namespace gdn::cuda::sm90 {

// Rows of o that no token's state is read for: those of a null sequence.
template <class T>
__device__ __forceinline__ void clear_output(const RuleParams& rule, const Work& work, int thread, int threads) {
  const TensorRef& o = rule.o;
  char* base = static_cast<char*>(o.data) +
               2 * (work.batch * o.stride[0] + work.begin * o.stride[1] + work.head * o.stride[2] + work.v_begin);
  constexpr int kPieces = T::kStateWgs * 8;
  for (int64_t i = thread; i < static_cast<int64_t>(work.tokens_before) * kPieces; i += threads) {
    *reinterpret_cast<uint4*>(base + (i / kPieces) * 2 * o.stride[1] + (i % kPieces) * 16) = make_uint4(0, 0, 0, 0);
  }
}

template <class T>
struct StateRole {
  using Element = typename T::Element;
  using Mid = typename T::Mid;
  static constexpr int kRegisters = T::kKeyDim / 2;  // of X per thread

  const KernelParams& p;
  uint32_t smem;
  SmallShared<T>& small;
  int wg;        // state warpgroup
  int slot = 0;  // of the work in hand
  // Of that work, in registers: what every chunk asks for.
  int end = 0;      // chunk behind its last one
  int limit = 0;    // chunk behind the CTA's last one; far off where more works follow
  int foreign = 0;  // first chunk with rows that are not its own

  __device__ __forceinline__ const Work& work() const { return small.works[slot]; }

  // The V tile of a chunk of the work in hand, or of the next one's first, into its slot. By one thread.
  __device__ __forceinline__ void load_v(int chunk) const {
    const Work& of = small.works[chunk < end ? slot : next_work(slot)];
    const uint32_t stage = chunk % T::kVStages, full = ptx::smem_address(&small.v_full[wg][stage]);
    if (!of.has_tiles()) {
      ptx::mbarrier_arrive(full);
      return;
    }
    ptx::mbarrier_expect_tx(full, kPanelBytes);
    ptx::tma_load(smem + T::kVOffset + stage * T::kVBytes + wg * kPanelBytes, &p.v, full, of.v_begin + 64 * wg, of.head,
                  of.first_token(chunk), of.batch);
  }

  // X[4j + e] is channel row(e) and key column 8j + 2t + (e & 1), with lane = 4g + t, row(e) = 16 warp + g + 8 (e >> 1).
  template <class Stored, class F>
  __device__ __forceinline__ void for_each_state_element(const TensorRef& state, int64_t slot, F&& f) const {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const int64_t channel = work().v_begin + 64 * wg + 16 * warp + (lane >> 2);
    const int64_t column = 2 * (lane & 3);
    const int64_t step_k = state.stride[2], step_v = 8 * state.stride[3];
    Stored* at = static_cast<Stored*>(state.data) + slot * state.stride[0] + work().head * state.stride[1] +
                 channel * state.stride[3] + column * step_k;
    // Steps, not products: 64 addresses from 64-bit multiplications took longer than the loads.
#pragma unroll
    for (int j = 0; j < T::kKeyDim / 8; ++j) {
      f(4 * j, at);
      f(4 * j + 1, at + step_k);
      f(4 * j + 2, at + step_v);
      f(4 * j + 3, at + step_k + step_v);
      at += 8 * step_k;
    }
  }

  __device__ __forceinline__ void load_state(float (&x)[kRegisters]) const {
    const TensorRef& state = p.rule.initial_state;
    if (work().read_slot < 0) {
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) x[i] = 0.f;
      return;
    }
    switch (state.dtype) {
      case GDN_F32:
        for_each_state_element<float>(state, work().read_slot, [&](int i, const float* e) { x[i] = *e; });
        break;
      case GDN_BF16:
        for_each_state_element<__nv_bfloat16>(state, work().read_slot,
                                              [&](int i, const __nv_bfloat16* e) { x[i] = __bfloat162float(*e); });
        break;
      default:
        for_each_state_element<__half>(state, work().read_slot,
                                       [&](int i, const __half* e) { x[i] = __half2float(*e); });
    }
  }

  // M is where the identity ends without values: column k of M in the place of value channel k.
  __device__ __forceinline__ void load_identity(float (&x)[kRegisters]) const {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const int away = 64 * wg + 16 * warp + (lane >> 2) - 2 * (lane & 3);  // channel of e = 0 - column of j = 0
#pragma unroll
    for (int j = 0; j < T::kKeyDim / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[4 * j + e] = away + 8 * (e >> 1) == 8 * j + (e & 1) ? 1.f : 0.f;
    }
  }

  __device__ __forceinline__ void store_state(const TensorRef& state, int64_t slot,
                                              const float (&x)[kRegisters]) const {
    switch (state.dtype) {
      case GDN_F32:
        for_each_state_element<float>(state, slot, [&](int i, float* e) { *e = x[i]; });
        break;
      case GDN_BF16:
        for_each_state_element<__nv_bfloat16>(state, slot,
                                              [&](int i, __nv_bfloat16* e) { *e = __float2bfloat16(x[i]); });
        break;
      default:
        for_each_state_element<__half>(state, slot, [&](int i, __half* e) { *e = __float2half(x[i]); });
    }
  }

  // Row of checkpoints for the state after `tokens` tokens, or -1.
  __device__ __forceinline__ int64_t checkpoint_slot(int64_t first, int64_t tokens) const {
    const int64_t entry = first + tokens / p.rule.checkpoint_every - 1;
    if (p.rule.checkpoint_indices.data == nullptr) return entry < p.rule.checkpoint_slots ? entry : -1;
    if (entry >= p.rule.checkpoint_indices.size) return -1;
    const int64_t slot = load_index(p.rule.checkpoint_indices, entry);
    if (is_null_slot(p.rule, slot)) return -1;
    if (slot < p.rule.checkpoint_slots) return slot;
    flag_error(p.rule, kBadCheckpointIndex);
    return -1;
  }

  // Tokens from `valid` on belong to another sequence: vt[2j + h] holds tokens 8j and 8j + 1 (past this lane's 2t).
  __device__ __forceinline__ static void clear_tail(uint32_t (&vt)[16], int valid) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t mask = 8 * j >= valid ? 0u : 8 * j + 1 >= valid ? 0xffffu : ~0u;
      vt[2 * j] &= mask;
      vt[2 * j + 1] &= mask;
    }
  }

  __device__ __forceinline__ void run() {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, t2 = 2 * (lane & 3);
    const bool elected = (threadIdx.x & 127) == 0;
    const int barrier = kStateBarrier0 + wg;
    // Of ldmatrix / stmatrix on sV and sO: matrix m = lane / 8 is tokens + 8 (m >> 1), channels + 8 (m & 1).
    const uint32_t tile_row = 8 * (lane >> 4) + (lane & 7), tile_piece = 2 * warp + ((lane >> 3) & 1);
    const uint32_t tile_offset =
        swizzled(tile_row, tile_piece);  // + 16 rows = + 2048 bytes: the swizzle repeats every 8 rows

    take_work();
    if (T::kIsForward && elected && end > 0) load_v(0);

    RingPosition<T::kKqStages> in;
    RingPosition<T::kProductStages> product;  // and of V
    int chunk = 0;
#pragma unroll 1
    for (;;) {
      float x[kRegisters];
      start(x);
      if (T::kIsForward && elected && chunk == 0 && 1 < limit) load_v(1);

#pragma unroll 1
      for (; chunk < end; ++chunk) {
        const uint32_t kq = smem + in.stage * T::kKqBytes, v = smem + T::kVOffset +
                                                               (T::kIsForward ? product.stage : in.stage) * T::kVBytes +
                                                               wg * kPanelBytes;
        const uint64_t kq_descriptor = ptx::wgmma_descriptor(kq, 16, 1024);
        const uint64_t inverse = ptx::wgmma_descriptor(smem + T::kTOffset + product.stage * kPanelBytes, 16, 1024);
        const Factors& factors = small.aux[product.stage].factors;

        uint32_t xb[kRegisters / 2];
#pragma unroll
        for (int i = 0; i < kRegisters / 2; ++i) xb[i] = ptx::pack2<Element>(x[2 * i], x[2 * i + 1]);

        ptx::mbarrier_wait(ptx::smem_address(&small.kq_full[in.stage]), in.parity);  // by the copy engine
        ptx::mbarrier_wait(ptx::smem_address(&small.product_full[product.stage]),
                           product.parity);  // by the auxiliary warps

        // Y = X [K; Q]^T (X K^T without outputs), in turns: in step, both warpgroups would wait for the tensor cores at once, and then neither use them.
        float y[T::kIsForward ? 64 : 32];
        if (T::kStateWgs == 2 && (wg == 1 || chunk > 0)) ptx::named_barrier_sync(kTurnBarrier0 + wg, 256);
        ptx::wgmma_touch(x);
        ptx::wgmma_fence();
#pragma unroll
        for (int kb = 0; kb < T::kKeyDim / 16; ++kb) {
          const uint64_t b = ptx::descriptor_advance(kq_descriptor, (kb >> 2) * T::kHalfBytes + (kb & 3) * 32);
          if constexpr (T::kIsForward) {
            ptx::wgmma_m64n128_rs<Element>(y, xb + 4 * kb, b, kb > 0);
          } else {
            ptx::wgmma_m64n64_rs<Element>(y, xb + 4 * kb, b, kb > 0);
          }
        }
        ptx::wgmma_commit();

        if constexpr (T::kIsForward) {
          // The chunk before's V tile is free once its output has left shared memory.
          if (elected && chunk > 0 && chunk + 1 < limit) {
            ptx::tma_store_wait_read();
            load_v(chunk + 1);
          }
          ptx::mbarrier_wait(ptx::smem_address(&small.v_full[wg][product.stage]),
                             product.parity);  // by the copy engine
        }
        uint32_t vt[16] = {};
        if (T::kIsForward || work().is_transition == 0) {
#pragma unroll
          for (int j = 0; j < 4; ++j) ptx::ldmatrix_x4_trans(vt + 4 * j, v + tile_offset + 2048 * j);
        }
        if (chunk >= foreign) clear_tail(vt, work().tokens_in(chunk) - t2);
        ptx::wgmma_wait<0>();
        ptx::wgmma_touch(y);
        if (T::kStateWgs == 2 && (wg == 0 || chunk + 1 < limit)) {
          ptx::named_barrier_arrive(kTurnBarrier0 + (wg ^ 1), 256);
        }

        // R = V^T - Y_K diag(e^G)
        uint32_t r[16];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 f = *reinterpret_cast<const float2*>(&factors.read_k[8 * j + t2]);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float2 value = ptx::unpack2<Element>(vt[2 * j + h]);
            r[2 * j + h] = ptx::pack2<Mid>(value.x - f.x * y[4 * j + 2 * h], value.y - f.y * y[4 * j + 2 * h + 1]);
          }
        }
        // U'^T = R T^T
        float u[32];
        ptx::wgmma_fence();
#pragma unroll
        for (int kb = 0; kb < 4; ++kb) {
          ptx::wgmma_m64n64_rs<Mid>(u, r + 4 * kb, ptx::descriptor_advance(inverse, kb * 32), kb > 0);
        }
        ptx::wgmma_commit();

        // Meanwhile O^T = Y_Q diag(scale e^G), X *= e^G_last.
        float o[32];
        if constexpr (T::kIsForward) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float2 f = *reinterpret_cast<const float2*>(&factors.read_q[8 * j + t2]);
            o[4 * j] = y[32 + 4 * j] * f.x;
            o[4 * j + 1] = y[32 + 4 * j + 1] * f.y;
            o[4 * j + 2] = y[32 + 4 * j + 2] * f.x;
            o[4 * j + 3] = y[32 + 4 * j + 3] * f.y;
          }
        }
        const float decay = factors.decay;
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) x[i] *= decay;
        ptx::wgmma_wait<0>();
        ptx::wgmma_touch(u);

        uint32_t ub[16], ud[16];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 f = *reinterpret_cast<const float2*>(&factors.update[8 * j + t2]);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float u0 = u[4 * j + 2 * h], u1 = u[4 * j + 2 * h + 1];
            ub[2 * j + h] = ptx::pack2<Mid>(u0, u1);
            ud[2 * j + h] = ptx::pack2<Element>(u0 * f.x, u1 * f.y);
          }
        }
        // X += (U'^T diag(e^(G_last - G))) K, O^T += U'^T P^T
        ptx::wgmma_touch(x);
        if constexpr (T::kIsForward) ptx::wgmma_touch(o);
        ptx::wgmma_fence();
        const uint64_t update = ptx::wgmma_descriptor(kq, T::kHalfBytes, 1024);
#pragma unroll
        for (int kb = 0; kb < 4; ++kb) {
          const uint64_t b = ptx::descriptor_advance(update, kb * 2048);
          if constexpr (T::kKeyDim == 128) {
            ptx::wgmma_m64n128_rs_trans<Element>(x, ud + 4 * kb, b, true);
          } else {
            ptx::wgmma_m64n64_rs_trans<Element>(x, ud + 4 * kb, b, true);
          }
        }
        ptx::wgmma_commit();
        if constexpr (T::kIsForward) {
#pragma unroll
          for (int kb = 0; kb < 4; ++kb) {
            ptx::wgmma_m64n64_rs<Mid>(o, ub + 4 * kb,
                                      ptx::descriptor_advance(inverse, T::kPOffset - T::kTOffset + kb * 32), true);
          }
          ptx::wgmma_commit();
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_touch(x);
        if constexpr (T::kIsForward) ptx::wgmma_touch(o);
        if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&small.product_empty[product.stage]));

        if constexpr (T::kIsForward) {
          // O into the place of V, of which every warp has read just what it writes now.
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            ptx::stmatrix_x4_trans(v + tile_offset + 2048 * j, ptx::pack2<Element>(o[8 * j], o[8 * j + 1]),
                                   ptx::pack2<Element>(o[8 * j + 2], o[8 * j + 3]),
                                   ptx::pack2<Element>(o[8 * j + 4], o[8 * j + 5]),
                                   ptx::pack2<Element>(o[8 * j + 6], o[8 * j + 7]));
          }
          ptx::fence_async_proxy();
          ptx::named_barrier_sync(barrier, 128);
          store_output(v, chunk, elected);
        }
        in.advance();
        product.advance();

        if (T::kIsForward && p.rule.checkpoint_every > 0) {
          const int32_t in_segment = (chunk + 1 - work().origin) * kChunk;
          const int64_t tokens = work().tokens_before + in_segment;
          if (in_segment <= work().len && tokens % p.rule.checkpoint_every == 0) {
            const int64_t slot = checkpoint_slot(work().first_checkpoint, tokens);
            if (slot >= 0) store_state(p.rule.checkpoints, slot, x);
          }
        }
      }
      finish(x);
      if (end == limit) break;
      slot = next_work(slot);
      take_work();
    }
    if (T::kIsForward && elected) ptx::tma_store_wait();
  }

  __device__ __forceinline__ void take_work() {
    end = work().end;
    limit = work().is_last ? end : INT_MAX;
    const bool whole = work().len % kChunk == 0 || work().begin + work().len == p.rule.T;
    foreign = work().has_tiles() ? whole ? INT_MAX : work().origin + work().len / kChunk : 0;
  }

  // X before the first chunk of the work in hand.
  __device__ __forceinline__ void start(float (&x)[kRegisters]) const {
    if constexpr (!T::kIsForward) {
      if (work().is_transition) {
        load_identity(x);
      } else {
        load_state(x);
      }
    } else {
      if (T::kKeyDim == 128 && work().segment > 0) {
        if constexpr (T::kKeyDim == 128) SegmentState<T>{p, smem, small, wg}.load(x);
      } else if (work().hand_over & kTakesOver) {
        take_over(x);
      } else {
        load_state(x);
        if constexpr (T::kKeyDim == 128) {
          if (work().num_segments > 1) SegmentState<T>{p, smem, small, wg}.announce_start();
        }
      }
      if (work().is_null && (work().hand_over & kTakesOver) == 0) {
        clear_output<T>(p.rule, work(), threadIdx.x, 128 * T::kStateWgs);
      }
    }
  }

  // Where X after the last one goes.
  __device__ __forceinline__ void finish(const float (&x)[kRegisters]) const {
    if constexpr (!T::kIsForward) {
      if (work().is_transition) {
        SegmentState<T>{p, smem, small, wg}.store_transition(x);
      } else {
        SegmentState<T>{p, smem, small, wg}.store_local(x);
      }
    } else {
      if (work().hand_over & kHandsOver) {
        hand_over(x);
      } else if (work().write_slot >= 0) {
        if constexpr (T::kKeyDim == 128) {
          if (work().segment > 0) SegmentState<T>{p, smem, small, wg}.await_start();
        }
        store_state(p.rule.final_state, work().write_slot, x);
      }
    }
  }

  // The state between the two parts of a cut sequence, from a share's CTA to the one before's.
  __device__ __forceinline__ float4* handed(int cta) const {
    return p.line.states + (static_cast<int64_t>(cta) * T::kStateWgs + wg) * (32 * kRegisters) + (threadIdx.x & 127);
  }
  __device__ __forceinline__ uint64_t* handed_flag(int cta) const { return p.line.flags + cta * T::kStateWgs + wg; }
  __device__ __forceinline__ void hand_over(const float (&x)[kRegisters]) const {
    float4* target = handed(small.line.cta - p.line.together);
#pragma unroll
    for (int i = 0; i < kRegisters / 4; ++i) {
      target[128 * i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
    ptx::named_barrier_sync(kStateBarrier0 + wg, 128);
    if ((threadIdx.x & 127) == 0) ptx::store_release(handed_flag(small.line.cta - p.line.together), p.line.tag);
  }
  __device__ __forceinline__ void take_over(float (&x)[kRegisters]) const {
    if ((threadIdx.x & 127) == 0) {
      while (ptx::load_acquire(handed_flag(small.line.cta)) != p.line.tag) {
      }
      *handed_flag(small.line.cta) = 0;
    }
    ptx::named_barrier_sync(kStateBarrier0 + wg, 128);
    const float4* source = handed(small.line.cta);
#pragma unroll
    for (int i = 0; i < kRegisters / 4; ++i) {
      const float4 four = __ldcg(source + 128 * i);
      x[4 * i] = four.x;
      x[4 * i + 1] = four.y;
      x[4 * i + 2] = four.z;
      x[4 * i + 3] = four.w;
    }
  }

  // sO -> o. The copy engine clips at the end of the tensor; a tail with another sequence behind it is stored by hand.
  __device__ __forceinline__ void store_output(uint32_t output, int chunk, bool elected) const {
    if (chunk < foreign) {
      if (elected) {
        ptx::tma_store(&p.o, output, work().v_begin + 64 * wg, work().head, work().first_token(chunk), work().batch);
      }
      return;
    }
    const int rest = work().tokens_in(chunk);
    const TensorRef& o = p.rule.o;
    char* base =
        static_cast<char*>(o.data) + 2 * (work().batch * o.stride[0] + work().first_token(chunk) * o.stride[1] +
                                          work().head * o.stride[2] + work().v_begin + 64 * wg);
    for (int i = threadIdx.x & 127; i < rest * 8; i += 128) {
      const uint32_t row = i >> 3, piece = i & 7;
      uint4 data;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
                   : "r"(output + swizzled(row, piece))
                   : "memory");
      *reinterpret_cast<uint4*>(base + row * 2 * o.stride[1] + piece * 16) = data;
    }
  }
};

}  // namespace gdn::cuda::sm90
