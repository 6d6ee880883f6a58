// Slices: rows of a group that the integer kernels hold at a time; here all of them, in one vector. Included inside the
// namespace of an instruction set, after its `F` and `I`.
constexpr int kSlice = 16;
using S = F;
using SI = I;

inline S slice_zero() { return zero(); }
inline S slice_set1(float x) { return set1(x); }
inline S slice_load(const void* p) { return load(static_cast<const float*>(p)); }
inline S slice_f16(const void* p) { return load_f16(p); }
inline S slice_i8(const void* p) { return load_i8(p); }
inline S slice_u8(const void* p) { return load_u8(p); }
inline SI slice_minus(const SI& x, int32_t y) { return add(x, set1_i(-y)); }
