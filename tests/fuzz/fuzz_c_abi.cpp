// SPDX-License-Identifier: MIT
// Random bytes become argument structs of every operator, over buffers whose real size is known. A call that the
// library accepts must stay inside the buffers that the views describe: a view whose extent leaves its buffer is pulled
// back before the call (a lie about memory cannot be detected by any library), everything else is passed as it is.
// What is checked: no sanitizer report, no crash, no hang; a refusal comes with a message and writes nothing.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "gdn/gdn.h"

namespace {

constexpr size_t kBufferBytes = 1 << 14;
constexpr int kNumTensors = 20;
constexpr unsigned char kFill = 0x3c;  // small finite numbers in every float type

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "fuzz_c_abi: %s: %s\n", what, gdn_last_error());
  std::abort();
}

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t next() { return at_ < size_ ? data_[at_++] : 0; }
  // Mostly a small number, sometimes anything.
  int64_t number(int64_t usual) {
    const uint8_t kind = next();
    if (kind < 200) return usual;
    if (kind < 240) return static_cast<int64_t>(next() % 9) - 1;
    int64_t wild = 0;
    for (int i = 0; i < 8; ++i) wild = static_cast<int64_t>((static_cast<uint64_t>(wild) << 8) | next());
    return wild;
  }
  int32_t small(int32_t usual) { return static_cast<int32_t>(number(usual)); }
  bool one_in(int n) { return next() % n == 0; }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

size_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case GDN_F64:
    case GDN_I64:
      return 8;
    case GDN_F32:
    case GDN_I32:
      return 4;
    case GDN_BF16:
    case GDN_F16:
      return 2;
    default:
      return 1;
  }
}

// Owns one exact-size heap buffer per tensor, so that ASan sees any step outside.
class Call {
 public:
  explicit Call(Bytes* bytes) : bytes_(bytes) {}

  const gdn_tensor* tensor(std::initializer_list<int64_t> usual_shape, bool index = false, bool optional = false) {
    if (optional ? !bytes_->one_in(3) : bytes_->one_in(40)) return nullptr;
    if (count_ == kNumTensors) return nullptr;
    gdn_tensor& t = tensors_[count_];
    std::vector<int64_t> shape(usual_shape);
    for (int64_t& s : shape) s = bytes_->number(s);
    constexpr int32_t kFloatTypes[] = {GDN_F32, GDN_F32, GDN_BF16, GDN_F16, GDN_F64};
    const int32_t usual = index ? (bytes_->one_in(2) ? GDN_I32 : GDN_I64) : kFloatTypes[bytes_->next() % 5];
    // Computed here and not by gdn_tensor_init: wild sizes may overflow the product.
    std::memset(&t, 0, sizeof(t));
    t.device_type = bytes_->one_in(60) ? GDN_CUDA : GDN_CPU;
    t.dtype = bytes_->small(usual);
    t.ndim = bytes_->small(static_cast<int32_t>(shape.size()));
    uint64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      t.shape[i] = shape[i];
      t.strides[i] = bytes_->number(static_cast<int64_t>(stride));
      stride *= static_cast<uint64_t>(shape[i]);
    }
    allocate(&t, index);
    ++count_;
    return &t;
  }

  // Tensors may alias on purpose: the same view or a shifted one.
  const gdn_tensor* alias(const gdn_tensor* other) {
    if (other == nullptr || count_ == kNumTensors) return other;
    if (bytes_->one_in(2)) return other;
    gdn_tensor& t = tensors_[count_];
    sizes_[count_] = 0;
    t = *other;
    ++count_;
    return &t;
  }

  bool unchanged() const {
    for (int i = 0; i < count_; ++i) {
      if (sizes_[i] > 0 && std::memcmp(buffers_[i].get(), copies_[i].get(), sizes_[i]) != 0) return false;
    }
    return true;
  }

  void check(gdn_status status) const {
    if (status == GDN_OK) return;
    if (std::strlen(gdn_last_error()) < 10) die("a refusal without a message");
    if (status == GDN_INTERNAL) die("an internal error");
    if (!unchanged()) die("a refused call wrote");
  }

 private:
  void allocate(gdn_tensor* t, bool index) {
    // Extent by the view; what does not fit the buffer budget is described as less.
    const size_t element = dtype_size(t->dtype);
    __extension__ unsigned __int128 extent = 1;
    bool sane = t->ndim >= 0 && t->ndim <= GDN_MAX_DIMS, empty = false;
    for (int32_t i = 0; sane && i < t->ndim; ++i) {
      if (t->shape[i] < 0 || t->strides[i] < 0) sane = false;
      if (t->shape[i] == 0) empty = true;
      if (sane && !empty) {
        extent += static_cast<unsigned __int128>(t->shape[i] - 1) * static_cast<unsigned __int128>(t->strides[i]);
      }
    }
    size_t size = kBufferBytes;
    if (sane && !empty) {
      if (extent * element <= kBufferBytes) {
        size = static_cast<size_t>(extent) * element;
      } else if (extent * element < static_cast<unsigned __int128>(INT64_MAX)) {
        for (int32_t i = 0; i < t->ndim; ++i) t->strides[i] = 0;  // legal for inputs, refused for outputs
      }
    }
    if (sane && empty) size = 8;
    unsigned char* memory = static_cast<unsigned char*>(std::malloc(size));
    if (memory == nullptr) std::abort();
    std::memset(memory, kFill, size);
    if (index) {
      for (size_t i = 0; i + element <= size; i += element) {
        const int64_t value = bytes_->number(static_cast<int64_t>(i / element) % 4);
        std::memcpy(memory + i, &value, element);
      }
    }
    unsigned char* copy = static_cast<unsigned char*>(std::malloc(size));
    if (copy == nullptr) std::abort();
    std::memcpy(copy, memory, size);
    buffers_[count_].reset(memory);
    copies_[count_].reset(copy);
    sizes_[count_] = size;
    t->data = bytes_->one_in(50) ? nullptr : memory;
  }

  struct Free {
    void operator()(unsigned char* p) const { std::free(p); }
  };
  Bytes* bytes_;
  int count_ = 0;
  gdn_tensor tensors_[kNumTensors];
  std::unique_ptr<unsigned char, Free> buffers_[kNumTensors], copies_[kNumTensors];
  size_t sizes_[kNumTensors] = {};
};

void fuzz_rule(Bytes* b, bool recurrent) {
  Call call(b);
  const int64_t B = 1 + b->next() % 2, T = b->next() % 9, Hk = 1 + b->next() % 2, Hv = Hk * (1 + b->next() % 2);
  const int64_t K = 1 + b->next() % 12, V = 1 + b->next() % 12, slots = 1 + b->next() % 5;
  const bool varlen = B == 1 && b->one_in(2);
  const int64_t N = varlen ? 1 + b->next() % 3 : B;
  const bool pool = b->one_in(2), v_first = b->one_in(2);
  const int64_t rows = pool ? slots : N, d2 = v_first ? V : K, d3 = v_first ? K : V;
  gdn_rule_args a = GDN_INIT(gdn_rule_args);
  a.q = call.tensor({B, T, Hk, K});
  a.k = call.tensor({B, T, Hk, K});
  a.v = call.tensor({B, T, Hv, V});
  a.g = call.tensor({B, T, Hv}, false, true);
  a.beta = call.tensor({B, T, Hv}, false, true);
  a.gate_form = b->small(b->next() % 3);
  if (a.gate_form == GDN_GATE_RAW) {
    a.A_log = call.tensor({Hv});
    a.dt_bias = call.tensor({Hv}, false, true);
  }
  a.o = call.tensor({B, T, Hv, V});
  a.beta_form = b->small(b->next() % 3);
  a.head_map = b->small(b->next() % 2);
  a.qk_l2norm = b->small(b->next() % 2);
  a.state_layout = b->small(v_first ? 1 : 0);
  a.null_slots = b->small(b->next() % 2);
  if (varlen) a.cu_seqlens = call.tensor({N + 1}, true);
  a.initial_state = call.tensor({rows, Hv, d2, d3}, false, true);
  a.final_state = b->one_in(2) ? call.alias(a.initial_state) : call.tensor({rows, Hv, d2, d3}, false, true);
  if (pool) {
    if (recurrent && b->one_in(2)) {
      a.token_state_indices = call.tensor({N, T}, true);
      a.num_accepted = call.tensor({N}, true, true);
    } else {
      a.initial_state_indices = call.tensor({N}, true, true);
      a.final_state_indices = call.tensor({N}, true, true);
    }
  }
  a.has_initial_state = call.tensor({N}, true, true);
  if (b->one_in(4)) a.snapshots = call.tensor({N, T, Hv, d2, d3});
  if (b->one_in(4)) {
    a.checkpoints = call.tensor({slots, Hv, d2, d3});
    a.checkpoint_indices = call.tensor({slots}, true, true);
    a.checkpoint_every = b->number(1 + b->next() % 4);
  }
  a.num_threads = b->small(1);
  if (a.num_threads > 4) a.num_threads = 4;  // thread counts are legal up to 1024; not worth starting them here
  a.batch_invariant = b->small(b->next() % 2);
  a.round_qk = b->small(0);
  if (b->one_in(30)) a.struct_size = static_cast<size_t>(b->number(8)) % (sizeof(a) + 1);
  constexpr const char* kImpls[] = {
      nullptr,        nullptr, "auto", "chunk_baseline", "reference_fp32", "reference_fp64", "recurrent_baseline",
      "no such thing"};
  a.impl = kImpls[b->next() % 8];
  char json[64];
  size_t needed = 0;
  if (b->one_in(4)) gdn_explain(recurrent ? GDN_OP_RECURRENT : GDN_OP_CHUNK_FORWARD, &a, json, sizeof(json), &needed);
  call.check(recurrent ? gdn_recurrent(&a) : gdn_chunk_forward(&a));
}

void fuzz_conv(Bytes* b) {
  Call call(b);
  const int64_t B = 1 + b->next() % 2, D = 1 + b->next() % 20, T = b->next() % 9, W = 1 + b->next() % 5;
  const int64_t L = W - 1 + b->next() % 4, slots = 1 + b->next() % 4;
  const bool varlen = B == 1 && b->one_in(2), pool = b->one_in(2);
  const int64_t N = varlen ? 1 + b->next() % 3 : B, rows = pool ? slots : N;
  gdn_conv1d_args a = GDN_INIT(gdn_conv1d_args);
  a.x = call.tensor({B, D, T});
  a.weight = call.tensor({D, W});
  a.bias = call.tensor({D}, false, true);
  a.y = b->one_in(3) ? call.alias(a.x) : call.tensor({B, D, T});
  if (varlen) a.cu_seqlens = call.tensor({N + 1}, true);
  a.initial_state = call.tensor({rows, D, L}, false, true);
  a.final_state = b->one_in(2) ? call.alias(a.initial_state) : call.tensor({rows, D, L}, false, true);
  if (pool) {
    a.initial_state_indices = call.tensor({N}, true, true);
    a.final_state_indices = call.tensor({N}, true, true);
  }
  a.has_initial_state = call.tensor({N}, true, true);
  if (b->one_in(3)) a.num_accepted = call.tensor({N}, true);
  a.activation = b->small(b->next() % 2);
  a.null_slots = b->small(b->next() % 2);
  a.num_threads = 1;
  call.check(gdn_causal_conv1d(&a));
}

void fuzz_gate(Bytes* b) {
  Call call(b);
  const int64_t B = b->next() % 3, T = b->next() % 6, H = 1 + b->next() % 20;
  gdn_gate_args a = GDN_INIT(gdn_gate_args);
  a.a = call.tensor({B, T, H});
  a.b = call.tensor({B, T, H});
  a.A_log = call.tensor({H});
  a.dt_bias = call.tensor({H}, false, true);
  a.g = b->one_in(8) ? call.alias(a.a) : call.tensor({B, T, H});
  a.beta = call.tensor({B, T, H});
  a.gate_form = b->small(b->next() % 2);
  a.beta_form = b->small(b->next() % 3);
  a.num_threads = 1;
  call.check(gdn_gate(&a));
}

void fuzz_norm(Bytes* b) {
  Call call(b);
  const int64_t B = b->next() % 3, T = b->next() % 6, D = 1 + b->next() % 40;
  gdn_rmsnorm_gated_args a = GDN_INIT(gdn_rmsnorm_gated_args);
  a.x = call.tensor({B, T, D});
  a.z = call.tensor({B, T, D}, false, true);
  a.weight = call.tensor({D}, false, true);
  a.out = b->one_in(3) ? call.alias(a.x) : call.tensor({B, T, D});
  a.eps = 1e-6f;
  a.activation = b->small(a.z != nullptr ? 1 + b->next() % 2 : 0);
  a.gate_first = b->small(b->next() % 2);
  a.zero_centered = b->small(b->next() % 2);
  a.round_before_weight = b->small(b->next() % 2);
  a.num_threads = 1;
  if (b->one_in(3)) {
    a.residual = call.tensor({B, T, D});
    const bool over_residual = b->one_in(3);
    a.residual_out = over_residual ? call.alias(a.residual) : call.tensor({B, T, D});
  }
  call.check(gdn_rmsnorm_gated(&a));
}

void fuzz_glu(Bytes* b) {
  Call call(b);
  const int64_t B = b->next() % 3, T = b->next() % 6, D = 1 + b->next() % 40;
  gdn_glu_args a = GDN_INIT(gdn_glu_args);
  a.x = call.tensor({B, T, D});
  a.z = call.tensor({B, T, D});
  a.out = b->one_in(3) ? call.alias(a.x) : call.tensor({B, T, D});
  a.activation = b->small(1 + b->next() % 2);
  a.num_threads = 1;
  call.check(gdn_glu(&a));
}

void fuzz_rope(Bytes* b) {
  Call call(b);
  const int64_t B = b->next() % 3, T = b->next() % 4, Hq = 1 + b->next() % 3, Hkv = 1 + b->next() % 2;
  const int64_t D = 2 + b->next() % 24, R = 2 + 2 * (b->next() % 8);
  const bool gate = b->one_in(2), positions = b->one_in(2), mrope = b->one_in(2);
  gdn_qk_rmsnorm_rope_args a = GDN_INIT(gdn_qk_rmsnorm_rope_args);
  a.q = call.tensor({B, T, Hq, gate ? 2 * D : D});
  a.k = call.tensor({B, T, Hkv, D});
  a.q_weight = call.tensor({D}, false, true);
  a.k_weight = call.tensor({D}, false, true);
  if (positions) {
    a.positions = mrope ? call.tensor({3, 1, T}, true) : call.tensor({B, T}, true);
    a.theta = 1e4f;
    a.rotary_dim = b->small(static_cast<int32_t>(R));
    if (mrope) a.mrope_section[0] = b->small(static_cast<int32_t>(R / 2));
  } else {
    a.cos = call.tensor({1, T, R});
    a.sin = call.tensor({1, T, R});
  }
  a.q_out = call.tensor({B, T, Hq, D});
  a.k_out = call.tensor({B, T, Hkv, D});
  if (gate) a.gate_out = call.tensor({B, T, Hq, D}, false, true);
  a.eps = 1e-6f;
  a.q_has_gate = b->small(gate ? 1 : 0);
  a.zero_centered = b->small(b->next() % 2);
  a.num_threads = 1;
  call.check(gdn_qk_rmsnorm_rope(&a));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  switch (bytes.next() % 6) {
    case 0:
      fuzz_rule(&bytes, false);
      break;
    case 1:
      fuzz_rule(&bytes, true);
      break;
    case 2:
      fuzz_conv(&bytes);
      break;
    case 3:
      fuzz_gate(&bytes);
      break;
    case 4:
      if (bytes.one_in(3)) {
        fuzz_glu(&bytes);
      } else {
        fuzz_norm(&bytes);
      }
      break;
    default:
      fuzz_rope(&bytes);
  }
  return 0;
}
