// Records in which Python describes a call, field by field those of kernels/native/descriptor.py. All fields are int64. A change of
// these records, or of a call's operands, raises the version in both files.
#pragma once

#include <cstdint>

namespace specsparse {

constexpr int kDescriptorVersion = 8;

// A packed matrix. `bytes` are those of a group of rows, or of one neuron. `data` and `bias` are places among a call's further
// operands, -1 for no bias. A table of zeros: codes are their own values.
struct MatrixDescriptor {
  int64_t codes, scales, sub, zero, rows, cols, bytes, data, bias;
  int64_t lut[16];
};

// A layer. -1 is an operand or a matrix that it does not have.
struct LayerDescriptor {
  int64_t attn_norm, ffn_norm, attn_q_norm, attn_k_norm, post_attention_norm, post_ffw_norm;  // operands
  int64_t attn_q, attn_k, attn_v, attn_output;                                                // matrices
  int64_t ffn_gate, ffn_up, ffn_down;  // matrices; rows of neurons if these are predicted
  int64_t keys, values;                // operands
  int64_t window, table;
  int64_t up_rows, down_blocks;                     // operands, if zeros are skipped or neurons masked
  int64_t gate_rows;                                 // operand, if neurons are masked
  int64_t first, second;                             // matrices of a predictor
  int64_t signs, threshold, least, predictor_norm;  // its operands
};

}  // namespace specsparse
