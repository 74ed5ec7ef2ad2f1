// The C interface of the grouped GEMMs: D[e] = A[e] @ B[e]^T for every expert e, in one launch.
//
// All pointers inside are device pointers: the host reads none of what they point to, so that a
// call can be captured and replayed with other numbers of rows. The setup kernel
// (moe_ops/backends/cutlass/setup.py) writes the arrays over experts.
//
// Each kernel NAME has three functions of C linkage:
//   int NAME_run(const GroupedGemm*)                0, or what went wrong: status() of common.cuh
//   size_t NAME_workspace(const GroupedGemm*)       bytes; depends on sm_count alone
//   int NAME_shared_memory()                        bytes a block
// Products of bf16 rows have no workspace, and one NAME_shared_memory.
// Block-scaled ones have three more, for tests on the host: blockscaled.cuh; int4 ones two:
// sm90_int4.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#define MOE_OPS_CUTLASS_ABI 3  // of this struct and of the functions: backends/cutlass/library.py

struct GroupedGemm {
  int32_t groups;    // experts
  int32_t sm_count;  // of the GPU, asked once
  // int32 (groups, 3): m, n, k of each group
  const void* problem_sizes;
  const void* a;  // int64 (groups): addresses
  const void* b;
  const void* d;
  // int64 (groups): leading dimensions in elements; of int4 weights layouts
  const void* stride_a;
  const void* stride_b;
  const void* stride_d;
  const void* row_scale;     // int64 (groups): addresses of fp32 scales along m, or of one
  const void* column_scale;  // the same along n
  int32_t row_scale_is_vector;
  int32_t column_scale_is_vector;
  const void* a_scale;  // int64 (groups): addresses of scales of blocks or groups of A, or null
  const void* b_scale;
  const void* a_scale_layout;  // (groups) layouts or strides of these, or null
  const void* b_scale_layout;
  const void* alpha;   // int64 (groups): addresses of one fp32 factor each, or null
  int32_t group_size;  // columns of a weight that share a scale, in the int4 kernels
  int32_t pdl;         // whether the kernel may start before the one before it has ended
  void* workspace;     // written: descriptors of the tensor memory accelerator
  size_t workspace_bytes;
  cudaStream_t stream;
};

// A product of rows sorted by expert, row-major all: of bf16 in sm90_products.cuh, where NAME_run takes
// it in place of GroupedGemm, and of e4m3 as a part of BlockScaledProduct.
struct GroupedProduct {
  int32_t groups;     // experts
  int32_t sm_count;   // multiprocessors that it takes; others are left to a kernel beside it
  const void* a;      // (rows, k), or of an outer product (rows, m)
  const void* b;      // (groups, n, k) or (groups, k, n), or of an outer product (rows, n)
  void* d;            // (rows, n), or of an outer product (groups, m, n)
  const void* ends;   // int32 (groups): the row after each expert's last
  int32_t rows;       // of all experts, and of none
  int32_t m;          // of an outer product alone
  int32_t n;
  int32_t k;          // 0 for an outer product
  cudaStream_t stream;
  // Added to a product of bf16 that is not an outer one: low_a (rows, rank) times low_b (groups, n,
  // rank) or (groups, rank, n), as b is. The rank is a multiple of 8; 0: nothing is added.
  const void* low_a;
  const void* low_b;
  int32_t rank;
};

// The activation of a product x w^T with the gate and up rows of w (groups, 2 n, k), which writes d
// (rows, n). NAME_run takes it in place of GroupedGemm.
struct GatedProduct {
  GroupedProduct product;
  const void* bias;     // (groups, 2 n) as rows of w are, bf16 or fp32, or null
  void* gate_up;        // (rows, 2 n): the product without bias, written; or null
  int32_t bias_is_float;
  int32_t interleaved;  // whether gate and up rows of w take turns; then gate_up is null
  int32_t activation;   // sm90_tiles.cuh
  float alpha;
  float beta;
  float limit;
  // (groups, n, k): the up rows, not interleaved; then product.b is (groups, n, k), the gate rows. Null:
  // product.b has both. Products of bf16 that add nothing.
  const void* up;
};

// The product of e4m3 rows and weights with fp32 scales: sm90_blocks.cuh. Sizes n and k are
// multiples of 16, the n of gated ones of 64 unless they are interleaved. NAME_run takes it in place
// of GroupedGemm.
struct BlockScaledProduct {
  GatedProduct gated;  // of a plain product its `product` alone; no gate_up. d is e4m3 if activated
  const void* a_scale;  // (k / 128, rows), with k / 128 rounded up
  const void* b_scale;  // (groups, rows of b / 128, k / 128), with both rounded up
  void* d_scale;        // (n / 128, rows), with n / 128 rounded up, written if activated
  int32_t powers;       // whether scales of d are powers of two
};
