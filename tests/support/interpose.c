/* Between a process and its C library (LD_PRELOAD): file system calls below a path fail, stall, or cost a modelled server
 * requests, and the wall clock is off.
 *
 * What happens is told by a table in a shared file (INTERPOSE), which the test changes while the process runs: see
 * interpose.py, which lays it out. A call that no entry is about goes straight through.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define ENTRIES 32

struct entry {
  char call[16];
  char below[1000];
  int32_t error;  /* errno; 0: none */
  int32_t left;   /* how often; below 0: always */
  int64_t stall;  /* microseconds before the call */
  int32_t done;   /* 1: the call is made, and then it fails */
  uint32_t hits;
  /* requests to the server: of each call, one more for a file that it opens, and of each MiB that it moves */
  int32_t requests;
  int32_t per_file;
  int32_t per_mib;
  int32_t unused;
};

/* All processes that share the table are its clients. It begins one request at a time, and a client waits for each. */
struct server {
  int64_t latency;   /* nanoseconds of a request */
  int64_t interval;  /* nanoseconds between the beginnings of two */
  int64_t next;      /* the moment at which it may begin another, by the monotonic clock */
  uint64_t requests; /* since the table was made */
};

struct table {
  int64_t clock;  /* nanoseconds that the wall clock is ahead */
  uint32_t used;  /* a bit for each entry */
  uint32_t unused;
  struct server server;
  struct entry entries[ENTRIES];
};

static volatile struct table *table;

static void *next_symbol(const char *name) {
  void *found = dlsym(RTLD_NEXT, name);
  return found;
}

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = next_symbol(#name); real; })

__attribute__((constructor)) static void attach(void) {
  const char *path = getenv("INTERPOSE");
  if (!path) return;
  int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  void *mapped = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped != MAP_FAILED) table = mapped;
}

static int is_below(const char *path, const char *below) {
  size_t length = strlen(below);
  return strncmp(path, below, length) == 0 && (path[length] == 0 || path[length] == '/');
}

static void name_of(int fd, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
  path[length < 0 ? 0 : length] = 0;
}

static volatile struct entry *about(const char *call, int fd, const char *name) {
  if (!table || !table->used) return NULL;
  char path[2 * PATH_MAX] = "";
  for (int i = 0; i < ENTRIES; i++) {
    volatile struct entry *entry = &table->entries[i];
    if (!(table->used & (1u << i)) || strcmp((const char *)entry->call, call) != 0) continue;
    if (!path[0]) {
      if (name && name[0] == '/') {
        snprintf(path, sizeof path, "%s", name);
      } else if (fd == AT_FDCWD) {
        if (syscall(SYS_getcwd, path, PATH_MAX) < 0) return NULL;
      } else {
        name_of(fd, path);
      }
      if (name && name[0] && name[0] != '/') {
        strncat(path, "/", sizeof path - strlen(path) - 1);
        strncat(path, name, sizeof path - strlen(path) - 1);
      }
    }
    if (!is_below(path, (const char *)entry->below)) continue;
    int32_t left = __atomic_load_n(&entry->left, __ATOMIC_SEQ_CST);
    while (left > 0 && !__atomic_compare_exchange_n(&entry->left, &left, left - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    if (left == 0) continue;
    __atomic_add_fetch(&entry->hits, 1, __ATOMIC_SEQ_CST);
    return entry;
  }
  return NULL;
}

/* One request. Gives the moment, in nanoseconds of the monotonic clock, at which its reply is there. */
int64_t interpose_request(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  int64_t now = time.tv_sec * 1000000000LL + time.tv_nsec, begins, next = __atomic_load_n(&table->server.next, __ATOMIC_SEQ_CST);
  do {
    begins = next > now ? next : now;
  } while (!__atomic_compare_exchange_n(&table->server.next, &next, begins + table->server.interval, 0, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST));
  __atomic_add_fetch(&table->server.requests, 1, __ATOMIC_SEQ_CST);
  return begins + table->server.latency;
}

static void request(int32_t count) {
  int before = errno;
  for (; count > 0; count--) {
    int64_t reply = interpose_request();
    struct timespec until = {reply / 1000000000LL, reply % 1000000000LL};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {
    }
  }
  errno = before;
}

/* Whatever `open` made, and how much `read` or `write` moved. */

static int opened(volatile struct entry *told, int flags, int fd) {
  if (told && fd >= 0 && !(flags & (O_DIRECTORY | O_PATH))) request(told->per_file);
  return fd;
}

static DIR *listed(volatile struct entry *told, DIR *directory) {
  if (told && directory) request(told->per_file);
  return directory;
}

static ssize_t moved(volatile struct entry *told, ssize_t size) {
  if (told && size > 0) request(told->per_mib * (int32_t)((size + (1 << 20) - 1) >> 20));
  return size;
}

/* Runs `make` (which sets `result`) as the entry says; gives `failed` with errno if it is to fail. */
#define AS_TOLD(call, fd, name, type, failed, make)                          \
  do {                                                                        \
    volatile struct entry *told = about(call, fd, name);                      \
    if (!told) return make;                                                   \
    int error = told->error, done = told->done;                               \
    if (told->stall) {                                                        \
      struct timespec rest = {told->stall / 1000000, told->stall % 1000000 * 1000}; \
      while (nanosleep(&rest, &rest) < 0 && errno == EINTR) {                 \
      }                                                                       \
    }                                                                         \
    request(told->requests);                                                  \
    if (!error) return make;                                                  \
    if (done) {                                                               \
      type ignored = make;                                                    \
      (void)ignored;                                                          \
    }                                                                         \
    errno = error;                                                            \
    return failed;                                                            \
  } while (0)

#define MODE(flags, mode)                                     \
  mode_t mode = 0;                                            \
  if ((flags) & (O_CREAT | O_TMPFILE)) {                      \
    va_list rest;                                             \
    va_start(rest, flags);                                    \
    mode = va_arg(rest, mode_t);                              \
    va_end(rest);                                             \
  }

int open(const char *path, int flags, ...) {
  MODE(flags, mode)
  AS_TOLD("open", AT_FDCWD, path, int, -1, opened(told, flags, REAL(open)(path, flags, mode)));
}
int open64(const char *path, int flags, ...) {
  MODE(flags, mode)
  AS_TOLD("open", AT_FDCWD, path, int, -1, opened(told, flags, REAL(open64)(path, flags, mode)));
}
int openat(int fd, const char *path, int flags, ...) {
  MODE(flags, mode)
  AS_TOLD("open", fd, path, int, -1, opened(told, flags, REAL(openat)(fd, path, flags, mode)));
}
int openat64(int fd, const char *path, int flags, ...) {
  MODE(flags, mode)
  AS_TOLD("open", fd, path, int, -1, opened(told, flags, REAL(openat64)(fd, path, flags, mode)));
}
DIR *opendir(const char *path) { AS_TOLD("open", AT_FDCWD, path, DIR *, NULL, listed(told, REAL(opendir)(path))); }
int rename(const char *from, const char *to) { AS_TOLD("rename", AT_FDCWD, to, int, -1, REAL(rename)(from, to)); }
int renameat(int a, const char *from, int b, const char *to) {
  AS_TOLD("rename", b, to, int, -1, REAL(renameat)(a, from, b, to));
}
int mkdir(const char *path, mode_t mode) { AS_TOLD("mkdir", AT_FDCWD, path, int, -1, REAL(mkdir)(path, mode)); }
int mkdirat(int fd, const char *path, mode_t mode) { AS_TOLD("mkdir", fd, path, int, -1, REAL(mkdirat)(fd, path, mode)); }
int rmdir(const char *path) { AS_TOLD("rmdir", AT_FDCWD, path, int, -1, REAL(rmdir)(path)); }
int unlink(const char *path) { AS_TOLD("unlink", AT_FDCWD, path, int, -1, REAL(unlink)(path)); }
int unlinkat(int fd, const char *path, int flags) { AS_TOLD("unlink", fd, path, int, -1, REAL(unlinkat)(fd, path, flags)); }
int link(const char *from, const char *to) { AS_TOLD("link", AT_FDCWD, to, int, -1, REAL(link)(from, to)); }
int linkat(int a, const char *from, int b, const char *to, int flags) {
  AS_TOLD("link", b, to, int, -1, REAL(linkat)(a, from, b, to, flags));
}
int stat(const char *path, struct stat *found) { AS_TOLD("stat", AT_FDCWD, path, int, -1, REAL(stat)(path, found)); }
int stat64(const char *path, struct stat64 *found) { AS_TOLD("stat", AT_FDCWD, path, int, -1, REAL(stat64)(path, found)); }
int lstat(const char *path, struct stat *found) { AS_TOLD("stat", AT_FDCWD, path, int, -1, REAL(lstat)(path, found)); }
int lstat64(const char *path, struct stat64 *found) { AS_TOLD("stat", AT_FDCWD, path, int, -1, REAL(lstat64)(path, found)); }
int fstatat(int fd, const char *path, struct stat *found, int flags) {
  AS_TOLD("stat", fd, path, int, -1, REAL(fstatat)(fd, path, found, flags));
}
int fstatat64(int fd, const char *path, struct stat64 *found, int flags) {
  AS_TOLD("stat", fd, path, int, -1, REAL(fstatat64)(fd, path, found, flags));
}
int utimensat(int fd, const char *path, const struct timespec times[2], int flags) {
  AS_TOLD("utime", fd, path, int, -1, REAL(utimensat)(fd, path, times, flags));
}
int futimens(int fd, const struct timespec times[2]) { AS_TOLD("utime", fd, NULL, int, -1, REAL(futimens)(fd, times)); }
int fsync(int fd) { AS_TOLD("fsync", fd, NULL, int, -1, REAL(fsync)(fd)); }
ssize_t read(int fd, void *buffer, size_t size) { AS_TOLD("read", fd, NULL, ssize_t, -1, moved(told, REAL(read)(fd, buffer, size))); }
ssize_t write(int fd, const void *buffer, size_t size) { AS_TOLD("write", fd, NULL, ssize_t, -1, moved(told, REAL(write)(fd, buffer, size))); }

/* The wall clock. Monotonic clocks and the file system's stay as they are. */

int clock_gettime(clockid_t clock, struct timespec *now) {
  int result = REAL(clock_gettime)(clock, now);
  if (result == 0 && table && table->clock && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    int64_t moved = now->tv_sec * 1000000000LL + now->tv_nsec + table->clock;
    now->tv_sec = moved / 1000000000LL;
    now->tv_nsec = moved % 1000000000LL;
  }
  return result;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec precise;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &precise) < 0) return -1;
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *where) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (where) *where = precise.tv_sec;
  return precise.tv_sec;
}
