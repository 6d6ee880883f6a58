#define SPECSPARSE_ISA avxvnni
#define SPECSPARSE_DOT dot_avxvnni
#define SPECSPARSE_DOT_GROUPS dot_groups_avxvnni
#include "dense/dot_256.inl"
