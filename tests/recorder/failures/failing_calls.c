/* Preloaded into a test: the n-th of the calls below that concerns a file under one folder fails, as a full, broken or
 * overtaken machine makes it fail. Files elsewhere (libraries, caches) are none of its business.
 *
 * arm(folder, n, error, stay) begins the count, armed_calls() ends it and returns how many there were. With n = 0 none fails.
 *
 * arm_memory(bytes, n, stay) has the n-th request for so many bytes of memory or more fail instead, whoever asks for it, but
 * not in threads that called spare(1).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t folder_length;
static atomic_long fails_at;
static int fails_with, stays;
static atomic_int armed;
static atomic_size_t large = (size_t)-1; /* requests of at least so many bytes count */
static __thread int spared;
static atomic_long *count; /* shared with children, so that whoever forks sees what they counted */

__attribute__((constructor)) static void begin(void) {
    count = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

/* With `stay`, all calls from the n-th on fail. */
void arm(const char *under, long n, int error, int stay) {
    snprintf(folder, sizeof folder, "%s", under);
    folder_length = strlen(folder);
    fails_with = error;
    stays = stay;
    atomic_store(&fails_at, n);
    atomic_store(count, 0);
    atomic_store(&armed, 1);
}

void arm_memory(size_t bytes, long n, int stay) {
    stays = stay;
    fails_with = ENOMEM;
    atomic_store(&fails_at, n);
    atomic_store(count, 0);
    atomic_store(&large, bytes);
}

void spare(int whether) { spared = whether; }

long armed_calls(void) {
    atomic_store(&armed, 0);
    atomic_store(&large, (size_t)-1);
    return atomic_load(count);
}

static int fails(void) {
    long number = atomic_fetch_add(count, 1) + 1, at = atomic_load(&fails_at);
    if (at == 0 || (stays ? number < at : number != at)) return 0;
    errno = fails_with;
    return 1;
}

static int no_memory(size_t bytes) { return bytes >= atomic_load(&large) && !spared && fails(); }

static int is_under(const char *path) {
    return folder_length && strncmp(path, folder, folder_length) == 0;
}

static int fd_under(int fd) {
    if (!atomic_load(&armed) || fd < 0) return 0;
    char link[64], path[PATH_MAX];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (size <= 0) return 0;
    path[size] = 0;
    return is_under(path);
}

static int path_under(int at, const char *path) {
    if (!atomic_load(&armed)) return 0;
    return path[0] == '/' ? is_under(path) : at >= 0 && fd_under(at);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define MODE(last) mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, last); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE(flags) REAL(open); return path_under(-1, path) && fails() ? -1 : real(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) REAL(open64); return path_under(-1, path) && fails() ? -1 : real(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) REAL(openat); return path_under(at, path) && fails() ? -1 : real(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) REAL(openat64); return path_under(at, path) && fails() ? -1 : real(at, path, flags, mode); }
FILE *fopen(const char *path, const char *how) { REAL(fopen); return path_under(-1, path) && fails() ? NULL : real(path, how); }
FILE *fopen64(const char *path, const char *how) { REAL(fopen64); return path_under(-1, path) && fails() ? NULL : real(path, how); }
ssize_t write(int fd, const void *data, size_t size) { REAL(write); return fd_under(fd) && fails() ? -1 : real(fd, data, size); }
ssize_t writev(int fd, const struct iovec *parts, int n) { REAL(writev); return fd_under(fd) && fails() ? -1 : real(fd, parts, n); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { REAL(pwrite); return fd_under(fd) && fails() ? -1 : real(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { REAL(pwrite64); return fd_under(fd) && fails() ? -1 : real(fd, data, size, at); }
ssize_t read(int fd, void *data, size_t size) { REAL(read); return fd_under(fd) && fails() ? -1 : real(fd, data, size); }
ssize_t pread(int fd, void *data, size_t size, off_t at) { REAL(pread); return fd_under(fd) && fails() ? -1 : real(fd, data, size, at); }
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { REAL(pread64); return fd_under(fd) && fails() ? -1 : real(fd, data, size, at); }
int fsync(int fd) { REAL(fsync); return fd_under(fd) && fails() ? -1 : real(fd); }
int fdatasync(int fd) { REAL(fdatasync); return fd_under(fd) && fails() ? -1 : real(fd); }
int ftruncate(int fd, off_t size) { REAL(ftruncate); return fd_under(fd) && fails() ? -1 : real(fd, size); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); return fd_under(fd) && fails() ? -1 : real(fd, size); }
int rename(const char *from, const char *to) { REAL(rename); return path_under(-1, to) && fails() ? -1 : real(from, to); }
int renameat(int at, const char *from, int into, const char *to) { REAL(renameat); return path_under(into, to) && fails() ? -1 : real(at, from, into, to); }

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);

void *malloc(size_t size) { return no_memory(size) ? NULL : __libc_malloc(size); }
void *calloc(size_t items, size_t size) { return no_memory(items * size) ? NULL : __libc_calloc(items, size); }
void *realloc(void *old, size_t size) { return no_memory(size) ? NULL : __libc_realloc(old, size); }
void *memalign(size_t to, size_t size) { return no_memory(size) ? NULL : __libc_memalign(to, size); }
void *aligned_alloc(size_t to, size_t size) { return no_memory(size) ? NULL : __libc_memalign(to, size); }
int posix_memalign(void **made, size_t to, size_t size) { return no_memory(size) || !(*made = __libc_memalign(to, size)) ? ENOMEM : 0; }

static int refused(int fd, int flags, size_t size) { return flags & MAP_ANONYMOUS ? no_memory(size) : fd_under(fd) && fails(); }
void *mmap(void *where, size_t size, int use, int flags, int fd, off_t at) { REAL(mmap); return refused(fd, flags, size) ? MAP_FAILED : real(where, size, use, flags, fd, at); }
void *mmap64(void *where, size_t size, int use, int flags, int fd, off64_t at) { REAL(mmap64); return refused(fd, flags, size) ? MAP_FAILED : real(where, size, use, flags, fd, at); }
