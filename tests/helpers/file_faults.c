/* Counts the calls of this process and its forks on the files of one folder, fails a range of them, or kills at one.

   Preloaded; idle until armed. See file_faults.py. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READS = 1, CHANGES = 2, TORN = -1 };
static char folder[PATH_MAX];
static size_t length;
static int kinds, error, log_fd;
static long first, last;
static long *count; /* shared by all forks */

/* "FOLDER\tLOG\tKINDS\tFIRST\tLAST\tERRNO": ERRNO 0 kills. */
void file_faults_arm(const char *text) {
    char log[PATH_MAX];
    if (sscanf(text, "%4095[^\t]\t%4095[^\t]\t%d\t%ld\t%ld\t%d", folder, log, &kinds, &first, &last, &error) != 6) abort();
    count = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    log_fd = syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 700); /* out of the way of programs that expect low numbers */
    syscall(SYS_close, fd);
    if (count == MAP_FAILED || log_fd < 0) abort();
    length = strlen(folder);
}

__attribute__((constructor)) static void arm(void) {
    if (getenv("FILE_FAULT")) file_faults_arm(getenv("FILE_FAULT"));
}

/* Returns whether the call must fail, with errno set; TORN for a write that has to write a part first. */
static int hit(const char *call, int kind, const char *path) {
    if (strncmp(path, folder, length) || (path[length] != '/' && path[length])) return 0;
    if (!(kind & kinds)) return 0;
    long number = __atomic_fetch_add(count, 1, __ATOMIC_SEQ_CST);
    char line[PATH_MAX + 64];
    int size = snprintf(line, sizeof line, "%s\t%s\n", call, path + length);
    syscall(SYS_write, log_fd, line, size);
    if (number < first || number > last) return 0;
    int writes = strstr(call, "write") != NULL && number == first && last > first;
    if (writes) return TORN;
    if (error) return errno = error, 1;
    if (strstr(call, "write")) return TORN;
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    return 1;
}

static int path_hit(const char *call, int kind, int at, const char *path) {
    if (!length || !path) return 0;
    char full[2 * PATH_MAX], link[40];
    if (path[0] == '/') return hit(call, kind, path);
    snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
    int saved = errno;
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, full, PATH_MAX - 1);
    errno = saved;
    if (size < 0) return 0;
    snprintf(full + size, PATH_MAX, path[0] ? "/%s" : "%s", path);
    return hit(call, kind, full);
}

static int fd_hit(const char *call, int kind, int fd) { return length && fd >= 0 && fd != log_fd ? path_hit(call, kind, fd, "") : 0; }

static int opens(int at, const char *path, int flags) {
    int changes = flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR);
    return path_hit(changes ? "create" : "open", changes ? CHANGES : READS, at, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define CALL(type, name, declared, given, test) \
    type name declared { \
        static __typeof__(&name) real; \
        if (!real) real = REAL(name); \
        if (test) return (type)-1; \
        return real given; \
    }
#define POINTER(type, name, declared, given, test) \
    type name declared { \
        static __typeof__(&name) real; \
        if (!real) real = REAL(name); \
        if (test) return NULL; \
        return real given; \
    }
#define OPEN(name, at, declared, ...) \
    int name declared { \
        static __typeof__(&name) real; \
        if (!real) real = REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | __O_TMPFILE)) { \
            va_list more; \
            va_start(more, flags); \
            mode = va_arg(more, mode_t); \
            va_end(more); \
        } \
        if (opens(at, path, flags)) return -1; \
        return real(__VA_ARGS__, flags, mode); \
    }
/* A torn write writes half. Then it is killed, or, where later calls fail as well, returns the half, as a full disk does. */
#define WRITE(name, declared, given, half) \
    ssize_t name declared { \
        static __typeof__(&name) real; \
        if (!real) real = REAL(name); \
        int found = fd_hit(#name, CHANGES, fd); \
        if (found == TORN) { \
            ssize_t written = size > 1 ? real half : 0; \
            if (!error) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL); \
            if (written > 0) return written; \
            return errno = error, -1; \
        } \
        if (found) return -1; \
        return real given; \
    }

OPEN(open, AT_FDCWD, (const char *path, int flags, ...), path)
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), path)
OPEN(openat, at, (int at, const char *path, int flags, ...), at, path)
OPEN(openat64, at, (int at, const char *path, int flags, ...), at, path)
POINTER(FILE *, fopen, (const char *path, const char *mode), (path, mode), opens(AT_FDCWD, path, strpbrk(mode, "wa+") ? O_CREAT : 0))
POINTER(FILE *, fopen64, (const char *path, const char *mode), (path, mode), opens(AT_FDCWD, path, strpbrk(mode, "wa+") ? O_CREAT : 0))
POINTER(DIR *, opendir, (const char *path), (path), path_hit("list", READS, AT_FDCWD, path))
POINTER(DIR *, fdopendir, (int fd), (fd), fd_hit("list", READS, fd))

WRITE(write, (int fd, const void *data, size_t size), (fd, data, size), (fd, data, size / 2))
WRITE(pwrite, (int fd, const void *data, size_t size, off_t to), (fd, data, size, to), (fd, data, size / 2, to))
WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t to), (fd, data, size, to), (fd, data, size / 2, to))
WRITE(writev, (int fd, const struct iovec *data, int size), (fd, data, size), (fd, data, size / 2))
CALL(ssize_t, copy_file_range, (int from, off64_t *a, int fd, off64_t *b, size_t size, unsigned flags), (from, a, fd, b, size, flags), fd_hit("copy", CHANGES, fd))
CALL(ssize_t, sendfile, (int fd, int from, off_t *a, size_t size), (fd, from, a, size), fd_hit("copy", CHANGES, fd))
CALL(ssize_t, sendfile64, (int fd, int from, off64_t *a, size_t size), (fd, from, a, size), fd_hit("copy", CHANGES, fd))
CALL(ssize_t, read, (int fd, void *data, size_t size), (fd, data, size), fd_hit("read", READS, fd))
CALL(ssize_t, pread, (int fd, void *data, size_t size, off_t from), (fd, data, size, from), fd_hit("read", READS, fd))
CALL(ssize_t, pread64, (int fd, void *data, size_t size, off64_t from), (fd, data, size, from), fd_hit("read", READS, fd))
CALL(void *, mmap, (void *at, size_t size, int access, int flags, int fd, off_t from), (at, size, access, flags, fd, from), fd_hit("map", READS, fd))
CALL(void *, mmap64, (void *at, size_t size, int access, int flags, int fd, off64_t from), (at, size, access, flags, fd, from), fd_hit("map", READS, fd))

CALL(int, fsync, (int fd), (fd), fd_hit("fsync", CHANGES, fd))
CALL(int, fdatasync, (int fd), (fd), fd_hit("fsync", CHANGES, fd))
CALL(int, ftruncate, (int fd, off_t size), (fd, size), fd_hit("truncate", CHANGES, fd))
CALL(int, ftruncate64, (int fd, off64_t size), (fd, size), fd_hit("truncate", CHANGES, fd))
CALL(int, truncate, (const char *path, off_t size), (path, size), path_hit("truncate", CHANGES, AT_FDCWD, path))
CALL(int, truncate64, (const char *path, off64_t size), (path, size), path_hit("truncate", CHANGES, AT_FDCWD, path))
CALL(int, flock, (int fd, int how), (fd, how), !(how & LOCK_UN) && fd_hit("lock", CHANGES, fd))
CALL(int, rename, (const char *path, const char *to), (path, to), path_hit("rename", CHANGES, AT_FDCWD, to))
CALL(int, renameat, (int at, const char *path, int at2, const char *to), (at, path, at2, to), path_hit("rename", CHANGES, at2, to))
CALL(int, renameat2, (int at, const char *path, int at2, const char *to, unsigned flags), (at, path, at2, to, flags), path_hit("rename", CHANGES, at2, to))
CALL(int, link, (const char *path, const char *to), (path, to), path_hit("link", CHANGES, AT_FDCWD, to))
CALL(int, linkat, (int at, const char *path, int at2, const char *to, int flags), (at, path, at2, to, flags), path_hit("link", CHANGES, at2, to))
CALL(int, symlink, (const char *path, const char *to), (path, to), path_hit("link", CHANGES, AT_FDCWD, to))
CALL(int, unlink, (const char *path), (path), path_hit("unlink", CHANGES, AT_FDCWD, path))
CALL(int, unlinkat, (int at, const char *path, int flags), (at, path, flags), path_hit("unlink", CHANGES, at, path))
CALL(int, remove, (const char *path), (path), path_hit("unlink", CHANGES, AT_FDCWD, path))
CALL(int, rmdir, (const char *path), (path), path_hit("rmdir", CHANGES, AT_FDCWD, path))
CALL(int, mkdir, (const char *path, mode_t mode), (path, mode), path_hit("mkdir", CHANGES, AT_FDCWD, path))
CALL(int, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), path_hit("mkdir", CHANGES, at, path))
CALL(int, chmod, (const char *path, mode_t mode), (path, mode), path_hit("chmod", CHANGES, AT_FDCWD, path))
CALL(int, fchmod, (int fd, mode_t mode), (fd, mode), fd_hit("chmod", CHANGES, fd))
CALL(int, utimensat, (int at, const char *path, const struct timespec times[2], int flags), (at, path, times, flags), path_hit("utime", CHANGES, at, path))
CALL(int, stat, (const char *path, struct stat *found), (path, found), path_hit("stat", READS, AT_FDCWD, path))
CALL(int, stat64, (const char *path, struct stat64 *found), (path, found), path_hit("stat", READS, AT_FDCWD, path))
CALL(int, lstat, (const char *path, struct stat *found), (path, found), path_hit("stat", READS, AT_FDCWD, path))
CALL(int, lstat64, (const char *path, struct stat64 *found), (path, found), path_hit("stat", READS, AT_FDCWD, path))
CALL(int, fstatat, (int at, const char *path, struct stat *found, int flags), (at, path, found, flags), path_hit("stat", READS, at, path))
CALL(int, fstatat64, (int at, const char *path, struct stat64 *found, int flags), (at, path, found, flags), path_hit("stat", READS, at, path))
CALL(int, access, (const char *path, int mode), (path, mode), path_hit("access", READS, AT_FDCWD, path))
CALL(int, faccessat, (int at, const char *path, int mode, int flags), (at, path, mode, flags), path_hit("access", READS, at, path))

/* Closes the file, whatever it returns. Only files open for writing count: a file server reports late errors here. */
int close(int fd) {
    if (length && fd != log_fd && (syscall(SYS_fcntl, fd, F_GETFL) & O_ACCMODE) != O_RDONLY && fd_hit("close", CHANGES, fd)) {
        int found = errno;
        syscall(SYS_close, fd);
        errno = found;
        return -1;
    }
    return syscall(SYS_close, fd);
}
