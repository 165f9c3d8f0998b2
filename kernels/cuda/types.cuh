// The few types and constants that NVRTC, which compiles without the standard library, does not bring.
#pragma once

#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else  // nvcc, for reading its reports
#include <cstdint>
#endif

#define INFINITY_F __int_as_float(0x7F800000)

// A tensor map is 128 opaque bytes that the driver encodes (CUtensorMap).
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

constexpr __host__ __device__ int round_up(int value, int step) {
  return (value + step - 1) / step * step;
}
constexpr __host__ __device__ int ceil_div(int value, int step) {
  return (value + step - 1) / step;
}
