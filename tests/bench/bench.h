/* What the mock upstream and the load generator share: clocks, pinning, the stamp that travels in each chunk. */
#ifndef LLMGW_BENCH_H
#define LLMGW_BENCH_H

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <arpa/inet.h>
#include <sched.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000ull
/* "@" + 19 digits of CLOCK_MONOTONIC in ns + "." + 8 digits of sequence: fixed width, so a chunk is a copy and two edits.
 * The clock is one for all processes of a machine, which is what makes mock -> client latency measurable. */
#define STAMP "@0000000000000000000.00000000"
#define STAMP_TIME_DIGITS 19
#define STAMP_SEQUENCE_DIGITS 8

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

/* Every loop here sleeps for less than the default 50 us timer slack. */
static inline void settle_on_cpu(int cpu) {
    prctl(PR_SET_TIMERSLACK, 1ul, 0ul, 0ul, 0ul);
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) die("cpu %d: %s", cpu, strerror(errno));
}

static inline void write_digits(char *at, int digits, uint64_t value) {
    while (digits-- > 0) {
        at[digits] = (char)('0' + value % 10);
        value /= 10;
    }
}

static inline void write_stamp(char *at, uint64_t time_ns, uint64_t sequence) {
    write_digits(at + 1, STAMP_TIME_DIGITS, time_ns);
    write_digits(at + 2 + STAMP_TIME_DIGITS, STAMP_SEQUENCE_DIGITS, sequence);
}

/* The value of a header in a head that ends with an empty line, or NULL. */
static inline const char *find_header(const char *head, size_t length, const char *name) {
    size_t wanted = strlen(name);
    const char *end = head + length;
    for (const char *line = memchr(head, '\n', length); line && (size_t)(end - line) > wanted + 2;
         line = memchr(line, '\n', (size_t)(end - line))) {
        line++;
        if (strncasecmp(line, name, wanted) == 0 && line[wanted] == ':') {
            line += wanted + 1;
            while (*line == ' ') line++;
            return line;
        }
    }
    return NULL;
}

#endif
