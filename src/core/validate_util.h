// SPDX-License-Identifier: MIT
// What the validators of all operators share: reading gdn_tensor into View with every per-tensor check, messages, the
// overlap rules, cu_seqlens and slot indices.
#pragma once
#include <initializer_list>
#include <string>
#include <vector>

#include "core/problem.h"
#include "core/status.h"

namespace gdn::validation {

inline constexpr int64_t kAnySize = -1;            // accepted as found
inline constexpr int64_t kMaxSequences = 1 << 24;  // keeps host metadata below 1 GiB
inline constexpr int64_t kMaxIndexEntries = 1 << 27;

// Bit sets of dtypes.
constexpr uint32_t dtype_bit(int32_t dtype) { return 1u << dtype; }
inline constexpr uint32_t kFloats = dtype_bit(GDN_F32) | dtype_bit(GDN_BF16) | dtype_bit(GDN_F16);
inline constexpr uint32_t kFloatsAndF64 = kFloats | dtype_bit(GDN_F64);
inline constexpr uint32_t kIndices = dtype_bit(GDN_I32) | dtype_bit(GDN_I64);
inline constexpr uint32_t kFlags = kIndices | dtype_bit(GDN_U8);

struct Dim {
  const char* name;
  int64_t size;  // expected, or kAnySize
};

// [begin, end) of the bytes that a view spans; empty for a view without elements.
struct ByteRange {
  uintptr_t begin = 0, end = 0;
  bool meets(const ByteRange& other) const { return begin < other.end && other.begin < end; }
};
ByteRange byte_range(const View& view);

// Proof of a shared element: kNo and kYes are exact; kUnknown when the search budget ran out.
enum class Overlap { kNo, kYes, kUnknown };
Overlap views_overlap(const View& a, const View& b);
Overlap overlaps_itself(const View& view);
bool same_view(const View& a, const View& b);

int64_t element_count(const View& view);
int64_t read_index(const View& view, int64_t i0, int64_t i1 = 0);

// Collects the first failure of one call. Every method returns false once something failed; text is built only then.
class Checker {
 public:
  Checker(const char* function, bool plan_only) : function_(function), plan_only_(plan_only) {}
  bool plan_only() const { return plan_only_; }
  bool failed() const { return !status_.ok(); }
  // Where the tensors read so far lie; the first one decides, every other must lie there too.
  const Place& place() const { return place_; }
  bool on_cuda() const { return place_.on_cuda(); }
  void set_stream(void* stream) { place_.stream = stream; }

  // Metadata that the host may read: the view itself on the CPU; on CUDA a copy with GDN_CHECK=1 (which waits for the
  // stream), else a view without data.
  bool host_metadata(const View& view, View* host);
  // With GDN_CHECK=1: reports what earlier unchecked calls on the device found wrong.
  bool earlier_errors();
  Status take() { return std::move(status_); }

  bool fail(gdn_status code, const char* argument, const std::string& found, const std::string& expected);
  bool invalid(const char* argument, const std::string& found, const std::string& expected) {
    return fail(GDN_INVALID_ARGUMENT, argument, found, expected);
  }
  bool unsupported(const char* argument, const std::string& found, const std::string& expected) {
    return fail(GDN_UNSUPPORTED, argument, found, expected);
  }

  // Copies the caller's struct of any published size into *out (fields the caller does not know are zero).
  bool read_struct(const void* args, size_t first_published_size, size_t known_size, void* out);

  // Absent tensor: *view becomes absent and the result is true. `output` adds the self-overlap rule.
  bool optional(const char* argument, const gdn_tensor* t, uint32_t dtypes, std::initializer_list<Dim> dims, View* view,
                bool output = false);
  bool required(const char* argument, const gdn_tensor* t, uint32_t dtypes, std::initializer_list<Dim> dims, View* view,
                bool output = false);
  // As optional, for a tensor of any rank in [min_dims, max_dims].
  bool any_rank(const char* argument, const gdn_tensor* t, uint32_t dtypes, int32_t min_dims, int32_t max_dims,
                View* view, bool output = false);

  bool in_range(const char* argument, int64_t value, int64_t low, int64_t high);
  bool flag(const char* argument, int32_t value) { return in_range(argument, value, 0, 1); }
  bool positive_dim(const char* argument, const char* name, int64_t size);
  bool threads(int32_t num_threads);

  // `output` shares no element with `other`; with `may_be_same` the exactly same view is fine.
  bool disjoint(const char* output_name, const View& output, const char* other_name, const View& other,
                bool may_be_same = false);

  // Of every output with every input and every other output. `may_be_same` names the pairs (output, other) that may be
  // exactly the same view.
  struct Named {
    const char* name;
    const View* view;
  };
  struct Pair {
    const View* output;
    const View* other;
  };
  bool all_disjoint(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs,
                    std::initializer_list<Pair> may_be_same);

 private:
  bool common(const char* argument, const gdn_tensor* t, uint32_t dtypes, const std::string& expected_shape,
              bool output, View* view);
  bool shape_is(const char* argument, const gdn_tensor* t, std::initializer_list<Dim> dims);
  bool metadata(const char* argument, const gdn_tensor* t, uint32_t dtypes, bool output, View* view);

  bool device_is(const char* argument, const gdn_tensor* t);

  const char* function_;
  bool plan_only_;
  Place place_;
  const char* placed_by_ = nullptr;        // the argument that decided place_
  std::vector<std::vector<char>> copies_;  // of device metadata
  Status status_;
};

// Sequences with their lengths, from cu_seqlens (checked) or from the batch.
bool build_sequences(Checker* check, const View& cu_seqlens, int64_t batch, int64_t tokens,
                     std::vector<Sequence>* seqs);
// N, with every check that needs no value of cu_seqlens.
bool count_sequences(Checker* check, const View& cu_seqlens, int64_t batch, int64_t* count);

// Slots of the states into seqs; everything about null slots and has_initial_state.
struct SlotArguments {
  const View* initial_state;
  const View* final_state;
  const View* initial_indices;
  const View* final_indices;
  const View* has_initial;
  int32_t null_slots;
};
bool is_null_slot(int64_t slot, int32_t null_slots);
bool build_slots(Checker* check, const SlotArguments& args, std::vector<Sequence>* seqs);

// GDN_CHECK=1 in the environment.
bool debug_checks();
// GDN_SPLIT_PAIRS in the environment: sequences are split of themselves up to this many pairs of sequence and head.
int64_t split_pairs();
// A slot that occurs twice in *slots (sorted in place; negative entries are skipped), or -1.
int64_t duplicate_slot(std::vector<int64_t>* slots);

std::string shape_text(const int64_t* shape, int32_t ndim);
const char* dtype_text(int32_t dtype);

}  // namespace gdn::validation
