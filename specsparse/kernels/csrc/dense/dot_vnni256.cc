// The same body in the encoding of AVX-512, for processors that have VNNI in that one alone.
#define SPECSPARSE_ISA vnni256
#define SPECSPARSE_DOT dot_vnni256
#define SPECSPARSE_DOT_GROUPS dot_groups_vnni256
#include "dense/dot_256.inl"
