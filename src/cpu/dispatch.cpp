// SPDX-License-Identifier: MIT
#include "cpu/dispatch.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace gdn::cpu {

#if defined(GDN_HAVE_BASELINE)
namespace n_baseline {
extern const IsaTable kTable;
}
#endif
#if defined(GDN_HAVE_NEON)
namespace n_neon {
extern const IsaTable kTable;
}
#endif
#if defined(GDN_HAVE_AVX2)
namespace n_avx2 {
extern const IsaTable kTable;
}
#endif
#if defined(GDN_HAVE_AVX512)
namespace n_avx512 {
extern const IsaTable kTable;
}
#endif

namespace {

constexpr Isa kAllIsas[] = {Isa::kBaseline, Isa::kNeon, Isa::kAvx2, Isa::kAvx512, Isa::kAmx};

#if defined(__x86_64__)
// clang's __builtin_cpu_supports does not know this name.
bool cpu_has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
bool cpu_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c() &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
bool cpu_has_avx512() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
}
// AMX tile data is off until the process asks Linux for it; threads started later inherit the permission, which is why
// this runs when the ISA is first looked up, before the pool has any.
bool cpu_has_amx() {
  if (!cpu_has_avx512() || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return false;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtileData) == 0;
}
#endif

bool detect(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
#if defined(GDN_HAVE_BASELINE) && defined(__x86_64__)
      return __builtin_cpu_supports("ssse3");
#elif defined(GDN_HAVE_BASELINE)
      return true;
#else
      return false;
#endif
    case Isa::kNeon:
#if defined(GDN_HAVE_NEON)
      return true;
#else
      return false;
#endif
#if defined(__x86_64__)
    case Isa::kAvx2:
      return cpu_has_avx2();
    case Isa::kAvx512:
      return cpu_has_avx512();
    case Isa::kAmx:
      return cpu_has_amx();
#endif
    default:
      return false;
  }
}

struct Usable {
  bool has[5] = {};
  Usable() {
    for (const Isa isa : kAllIsas) has[static_cast<int>(isa)] = isa_compiled(isa) && detect(isa);
  }
};
const Usable& usable() {
  static const Usable u;
  return u;
}

Isa best_usable() {
  Isa best = Isa::kBaseline;
  for (const Isa isa : kAllIsas) {
    if (usable().has[static_cast<int>(isa)]) best = isa;
  }
  return best;
}

bool find_isa(const char* name, Isa* isa) {
  for (const Isa candidate : kAllIsas) {
    if (std::strcmp(name, isa_name(candidate)) == 0) {
      *isa = candidate;
      return true;
    }
  }
  return false;
}

std::atomic<int32_t>& cap() {
  // The environment is read once. A name that cannot be had leaves the default, and says so: there is no call to refuse.
  static std::atomic<int32_t> value{[] {
    const char* name = std::getenv("GDN_ISA");
    Isa isa;
    if (name != nullptr && find_isa(name, &isa) && usable().has[static_cast<int>(isa)])
      return static_cast<int32_t>(isa);
    if (name != nullptr && std::strcmp(name, "auto") != 0) {
      std::fprintf(
          stderr,
          "libgdn: environment variable GDN_ISA: found '%s', expected auto or an ISA of this machine; using '%s'\n",
          name, isa_name(best_usable()));
    }
    return static_cast<int32_t>(best_usable());
  }()};
  return value;
}

}  // namespace

bool isa_compiled(Isa isa) {
  switch (isa) {
#if defined(GDN_HAVE_BASELINE)
    case Isa::kBaseline:
      return true;
#endif
#if defined(GDN_HAVE_NEON)
    case Isa::kNeon:
      return true;
#endif
#if defined(GDN_HAVE_AVX2)
    case Isa::kAvx2:
      return true;
#endif
#if defined(GDN_HAVE_AVX512)
    case Isa::kAvx512:
      return true;
#endif
#if defined(GDN_HAVE_AMX)
    case Isa::kAmx:
      return true;
#endif
    default:
      return false;
  }
}

bool isa_usable(Isa isa) { return usable().has[static_cast<int>(isa)]; }

Isa active_isa() { return static_cast<Isa>(cap().load(std::memory_order_relaxed)); }

bool set_isa_cap(const char* name, const char** why_not) {
  *why_not = nullptr;
  if (std::strcmp(name, "auto") == 0) {
    cap().store(static_cast<int32_t>(best_usable()), std::memory_order_relaxed);
    return true;
  }
  Isa isa;
  if (!find_isa(name, &isa)) {
    *why_not = "unknown ISA";
    return false;
  }
  if (!isa_compiled(isa)) {
    *why_not = "not in this build";
    return false;
  }
  if (!isa_usable(isa)) {
    *why_not = "this CPU or operating system lacks it";
    return false;
  }
  cap().store(static_cast<int32_t>(isa), std::memory_order_relaxed);
  return true;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kNeon:
      return "neon";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAmx:
      return "amx";
    default:
      return "baseline";
  }
}

const IsaTable& isa_table(Isa isa) {
  switch (isa) {
#if defined(GDN_HAVE_AVX512)
    case Isa::kAvx512:
    case Isa::kAmx:
      return n_avx512::kTable;
#endif
#if defined(GDN_HAVE_AVX2)
    case Isa::kAvx2:
      return n_avx2::kTable;
#endif
    default:
#if defined(GDN_HAVE_NEON)
      return n_neon::kTable;
#else
      return n_baseline::kTable;
#endif
  }
}

}  // namespace gdn::cpu
