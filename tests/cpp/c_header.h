/* SPDX-License-Identifier: MIT */
#ifndef GDN_TESTS_C_HEADER_H_
#define GDN_TESTS_C_HEADER_H_
#include "gdn/gdn.h"
#ifdef __cplusplus
extern "C" {
#endif
/* One token, one head, K = 2, V = 3, k = e0, beta = 1: o and row 0 of the state become v = [1, 2, 3]. */
gdn_status gdn_test_call_from_c(float* o, float* state);
#ifdef __cplusplus
}
#endif
#endif
