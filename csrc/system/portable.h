// Included first in every file: keeps what is compiled here loadable on systems with an older C library and C++
// library, as old as those that torch's own wheels need (glibc 2.28).
#pragma once

#include <cstddef>  // which defines what follows

#if defined(__GLIBCXX__) && defined(__x86_64__)
// Waits with a time limit then call pthread_cond_timedwait, and look at the steady clock themselves.
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
// Newer names of functions that did the same under these.
asm(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
asm(".symver dlopen, dlopen@GLIBC_2.2.5");
asm(".symver dlsym, dlsym@GLIBC_2.2.5");
asm(".symver dlerror, dlerror@GLIBC_2.2.5");
#endif
