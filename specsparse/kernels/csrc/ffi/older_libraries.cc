// Two functions of libstdc++ that headers of newer compilers call and older libraries lack. With them here the library
// asks for nothing that came after glibc 2.27 and GCC 8, as `make wheel` checks.
#include <new>
#include <sstream>

#ifdef __GLIBCXX__

template std::basic_stringstream<char>::basic_stringstream();  // exported since GCC 9; XLA's headers call it

namespace std {
void __throw_bad_array_new_length();  // declared by GCC 11 and later alone
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif
