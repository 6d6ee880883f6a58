#define SPECSPARSE_ISA avxvnni
#define SPECSPARSE_DOT dot_avxvnni
#include "dense/dot_256.inl"
