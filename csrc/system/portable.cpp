// The C++ library's headers ask this variable of glibc 2.32 whether they may do without atomic instructions. Here they
// may not, and no later glibc is needed.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;  // NOLINT(bugprone-reserved-identifier): glibc's
}
