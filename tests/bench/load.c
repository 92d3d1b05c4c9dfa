/* A load generator that out-runs what it measures: one epoll loop, no allocation per reply, every reply verified.
 *
 * It reads the watched processes' CPU clocks itself, at the edges of its own window, and prints one JSON object.
 */
#define _GNU_SOURCE
#include "bench.h"

#define MAX_CONNS 4096
#define MAX_WATCHED 64
#define READ_SIZE (256 * 1024)

enum stage { HEAD, LENGTH, UNTIL_CLOSE, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER, DONE };
enum stamp_stage { TEXT, MARK, TIME, SEQUENCE };

struct conn {
    int fd, busy, generation;
    enum stage stage;
    enum stamp_stage stamp_stage;
    uint64_t started, left, stamp_time, stamp_sequence, next_sequence, expected;
    int usage_seen, closes, status, line_length, body_seen;
    size_t head_length, tail_length;
    char tail[16];
    char head[8192];
};

#define BUCKETS (64 * 60)

/* Log-linear: 64 steps per power of two, so a percentile is right within 1.6 %. */
struct histogram {
    uint64_t total, counts[BUCKETS];
};

static struct conn conns[MAX_CONNS];
static struct histogram replies, first_bytes, latencies;
static uint64_t chunk_count, error_count, usage_expected;
static int measuring, poller;
static char buffer[READ_SIZE], first_error[160];

static int port, streaming, varied, connection_count = 1, cpu = -1;
static uint64_t chunks = 100, rate = 50, enough;
static double seconds = 2, warm = 0.5;
static const char *mode = "whole", *model = "bench", *path = "/v1/chat/completions", *key = "";
/* Processes of the gateway, and those beside it that do a part of its work elsewhere: their figures are kept apart. */
static struct group {
    int pids[MAX_WATCHED], count;
} watched, beside;

static void add(struct histogram *h, uint64_t value) {
    int power = value < 64 ? 0 : 57 - __builtin_clzll(value);
    h->counts[value < 64 ? value : 64 + (uint64_t)power * 64 + ((value >> power) & 63)]++;
    h->total++;
}

/* In ms; the value below which a share of all lies. */
static double percentile(const struct histogram *h, double share) {
    uint64_t seen = 0, wanted = (uint64_t)((double)h->total * share);
    for (uint64_t i = 0; i < BUCKETS; i++) {
        seen += h->counts[i];
        if (seen > wanted) return (double)(i < 64 ? i : (64 + i % 64) << (i / 64 - 1)) / 1e6;
    }
    return 0;
}

/* The CPU time of a whole process, threads that have ended included, exact to the nanosecond (man clock_getcpuclockid). */
static double cpu_seconds(const struct group *g) {
    double sum = 0;
    for (int i = 0; i < g->count; i++) {
        clockid_t clock;
        struct timespec t;
        if (clock_getcpuclockid(g->pids[i], &clock) == 0 && clock_gettime(clock, &t) == 0)
            sum += (double)t.tv_sec + (double)t.tv_nsec / 1e9;
    }
    return sum;
}

/* smaps_rollup counts pages; statm is an estimate that may be off by 64 pages per cpu. */
static long rss_kib(const struct group *g) {
    long sum = 0;
    for (int i = 0; i < g->count; i++) {
        char name[64], line[256];
        long kib;
        snprintf(name, sizeof name, "/proc/%d/smaps_rollup", g->pids[i]);
        FILE *file = fopen(name, "r");
        if (!file) continue;
        while (fgets(line, sizeof line, file))
            if (sscanf(line, "Rss: %ld", &kib) == 1) sum += kib;
        fclose(file);
    }
    return sum;
}

__attribute__((format(printf, 1, 2))) static void note_error(const char *format, ...) {
    error_count++;
    if (first_error[0]) return;
    va_list args;
    va_start(args, format);
    vsnprintf(first_error, sizeof first_error, format, args);
    va_end(args);
    for (char *p = first_error; *p; p++)
        if ((unsigned char)*p < 32 || *p == '"' || *p == '\\') *p = ' ';
}

static void open_connection(struct conn *c) {
    int yes = 1, small = 32 * 1024;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (strcmp(mode, "slow") == 0) setsockopt(c->fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(c->fd, (struct sockaddr *)&a, sizeof a) != 0) die("load: port %d: %s", port, strerror(errno));
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &e);
}

static void reopen(struct conn *c) {
    close(c->fd);
    open_connection(c);
}

static void start(struct conn *c) {
    static const char filler[] =
        "You are a helpful assistant. Answer in one short paragraph, in plain words, and name the source of each claim.";
    char body[1024], request[2048];
    /* The first stream of a connection is cut short at random, else all of them would end in the same instant. */
    uint64_t count = c->generation++ || !varied ? chunks : 1 + (uint64_t)rand() % chunks;
    int length = snprintf(body, sizeof body,
                          "{\"model\":\"%s\",\"messages\":[{\"role\":\"system\",\"content\":\"%s\"},{\"role\":\"user\",\"content\":"
                          "\"chunks=%llu rate=%llu Tell me about the fox and the dog.\"}],\"temperature\":0.7,\"max_tokens\":256%s%s}",
                          model, filler, (unsigned long long)count, (unsigned long long)rate,
                          streaming ? ",\"stream\":true" : "",
                          usage_expected ? ",\"stream_options\":{\"include_usage\":true}" : "");
    int total = snprintf(request, sizeof request,
                         "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
                         "Content-Length: %d\r\n\r\n%s",
                         path, port, key[0] ? key : "none", length, body);
    c->stage = HEAD;
    c->stamp_stage = TEXT;
    c->head_length = c->tail_length = 0;
    c->next_sequence = 0;
    c->usage_seen = c->closes = c->body_seen = 0;
    c->expected = streaming ? count : 1;
    c->busy = 1;
    c->started = now_ns();
    if (send(c->fd, request, (size_t)total, MSG_NOSIGNAL) != total) note_error("send: %s", strerror(errno));
}

static void take_stamp(struct conn *c, uint64_t now) {
    if (c->stamp_sequence != c->next_sequence)
        note_error("chunk %llu came where %llu was due", (unsigned long long)c->stamp_sequence, (unsigned long long)c->next_sequence);
    if (c->next_sequence == 0 && measuring) add(&first_bytes, now - c->started);
    c->next_sequence = c->stamp_sequence + 1;
    if (!measuring) return;
    chunk_count++;
    add(&latencies, now > c->stamp_time ? now - c->stamp_time : 0);
}

/* Finds the stamps, wherever reads and chunks cut them. */
static void scan(struct conn *c, const char *p, size_t n, uint64_t now) {
    if (n >= sizeof c->tail) {
        memcpy(c->tail, p + n - sizeof c->tail, sizeof c->tail);
        c->tail_length = sizeof c->tail;
    } else {
        size_t keep = c->tail_length + n > sizeof c->tail ? sizeof c->tail - n : c->tail_length;
        memmove(c->tail, c->tail + c->tail_length - keep, keep);
        memcpy(c->tail + keep, p, n);
        c->tail_length = keep + n;
    }
    for (const char *end = p + n; p < end; p++) {
        if (c->stamp_stage == TEXT) {
            p = memchr(p, '@', (size_t)(end - p));
            if (!p) return;
            c->stamp_stage = MARK;
            c->stamp_time = c->stamp_sequence = 0;
            continue;
        }
        unsigned digit = (unsigned)(*p - '0');
        if (c->stamp_stage == MARK) {
            if (*p == 'U') c->usage_seen++;
            c->stamp_stage = digit < 10 ? TIME : TEXT;
        }
        if (c->stamp_stage == TIME) {
            if (digit < 10) c->stamp_time = c->stamp_time * 10 + digit;
            else c->stamp_stage = SEQUENCE;
        } else if (c->stamp_stage == SEQUENCE) {
            if (digit < 10) {
                c->stamp_sequence = c->stamp_sequence * 10 + digit;
            } else {
                take_stamp(c, now);
                c->stamp_stage = TEXT;
            }
        }
    }
}

static void read_head(struct conn *c) {
    const char *value;
    c->status = c->head_length > 12 ? atoi(c->head + 9) : 0;
    value = find_header(c->head, c->head_length, "connection");
    c->closes = value && strncasecmp(value, "close", 5) == 0;
    if ((value = find_header(c->head, c->head_length, "transfer-encoding")) && strncasecmp(value, "chunked", 7) == 0) {
        c->stage = CHUNK_SIZE;
        c->left = 0;
    } else if ((value = find_header(c->head, c->head_length, "content-length"))) {
        c->left = strtoull(value, NULL, 10);
        c->stage = c->left ? LENGTH : DONE;
    } else {
        c->stage = UNTIL_CLOSE;
    }
}

/* Feeds bytes of a reply; returns how many belong to it. */
static size_t feed(struct conn *c, const char *p, size_t n, uint64_t now) {
    const char *begin = p, *end = p + n;
    while (p < end && c->stage != DONE) {
        size_t have = (size_t)(end - p), take;
        switch (c->stage) {
        case HEAD:
            if (c->head_length >= sizeof c->head - 1) die("load: a reply's head is over 8 KiB");
            c->head[c->head_length++] = *p++;
            if (c->head_length >= 4 && memcmp(c->head + c->head_length - 4, "\r\n\r\n", 4) == 0) {
                c->head[c->head_length] = 0;
                read_head(c);
            }
            break;
        case LENGTH:
        case CHUNK_DATA:
            take = have < c->left ? have : (size_t)c->left;
            if (c->status != 200 && !c->body_seen) note_error("status %d: %.*s", c->status, (int)take, p);
            c->body_seen = 1;
            scan(c, p, take, now);
            p += take;
            c->left -= take;
            if (c->left == 0) c->stage = c->stage == LENGTH ? DONE : CHUNK_END;
            break;
        case UNTIL_CLOSE:
            scan(c, p, have, now);
            p = end;
            break;
        case CHUNK_SIZE:
            if (*p == '\n') {
                c->stage = c->left ? CHUNK_DATA : TRAILER;
                c->line_length = 0;
            } else if (*p != '\r') {
                unsigned char low = (unsigned char)(*p | 0x20);
                unsigned value = low >= 'a' ? low - 'a' + 10u : (unsigned)(*p - '0');
                if (value > 15) die("load: a chunk's size has %c in it", *p);
                c->left = c->left * 16 + value;
            }
            p++;
            break;
        case CHUNK_END:
            if (*p == '\n') {
                c->stage = CHUNK_SIZE;
                c->left = 0;
            }
            p++;
            break;
        case TRAILER:
            if (*p == '\n') {
                if (c->line_length == 0) c->stage = DONE;
                c->line_length = 0;
            } else if (*p != '\r') {
                c->line_length++;
            }
            p++;
            break;
        case DONE:
            break;
        }
    }
    return (size_t)(p - begin);
}

static void finish(struct conn *c, uint64_t now) {
    c->busy = 0;
    if (c->status != 200) {
        if (!c->body_seen) note_error("status %d", c->status);
        return;
    }
    if (c->next_sequence != c->expected)
        note_error("%llu of %llu chunks came", (unsigned long long)c->next_sequence, (unsigned long long)c->expected);
    else if (streaming && (c->tail_length < 14 || memcmp(c->tail + c->tail_length - 14, "data: [DONE]\n\n", 14) != 0))
        note_error("no [DONE] at the end of a stream");
    else if (c->usage_seen != (int)usage_expected)
        note_error("%d usage events where %d was asked for", c->usage_seen, (int)usage_expected);
    if (measuring) add(&replies, now - c->started);
}

static void read_from(struct conn *c, int again) {
    ssize_t n = recv(c->fd, buffer, READ_SIZE, 0);
    if (n < 0 && errno == EAGAIN) return;
    uint64_t now = now_ns();
    if (n <= 0) {
        if (c->busy && c->stage == UNTIL_CLOSE) finish(c, now);
        else if (c->busy) note_error(c->stage == HEAD ? "closed before a reply" : "closed within a reply");
        c->busy = 0;
        reopen(c);
        if (again) start(c);
        return;
    }
    size_t used = feed(c, buffer, (size_t)n, now);
    if (used < (size_t)n) note_error("%zu bytes after the end of a reply", (size_t)n - used);
    if (c->stage != DONE) return;
    finish(c, now);
    if (c->closes) reopen(c);
    if (again) start(c);
}

static void turn(int timeout_ms, int again) {
    struct epoll_event ready[256];
    int n = epoll_wait(poller, ready, 256, timeout_ms);
    for (int i = 0; i < n; i++) read_from(ready[i].data.ptr, again);
}

static void print_latency(const char *name, const struct histogram *h) {
    printf(",\"%s_p50_ms\":%.4f,\"%s_p99_ms\":%.4f", name, percentile(h, 0.5), name, percentile(h, 0.99));
}

/* Whether as much was seen as was asked for, which is how a test ends without a clock. */
static int saw_enough(void) { return enough && (streaming ? chunk_count : replies.total) + error_count >= enough; }

/* Closed loop: each connection starts again when its reply is whole. */
static void run_window(void) {
    uint64_t begin = now_ns(), ramp = (uint64_t)(warm * 0.5e9), from = begin + (uint64_t)(warm * 1e9), until = 0, window = 0;
    double cpu_before = 0, beside_before = 0, own_before = 0;
    int started = 0;
    for (;;) {
        uint64_t now = now_ns();
        while (started < connection_count && now >= begin + ramp * (uint64_t)started / (uint64_t)connection_count)
            start(&conns[started++]);
        if (!measuring && now >= from) {
            measuring = 1;
            cpu_before = cpu_seconds(&watched);
            beside_before = cpu_seconds(&beside);
            own_before = (double)clock() / CLOCKS_PER_SEC;
            window = now_ns();
            until = window + (uint64_t)(seconds * 1e9);
        }
        if (measuring && (now >= until || saw_enough())) break;
        turn(started < connection_count ? 1 : 20, 1);
    }
    double elapsed = (double)(now_ns() - window) / 1e9, cpu_used = cpu_seconds(&watched) - cpu_before;
    double beside_used = cpu_seconds(&beside) - beside_before;
    double own = ((double)clock() / CLOCKS_PER_SEC - own_before) / elapsed;
    printf("{\"seconds\":%.4f,\"cpu_seconds\":%.6f,\"load_cpu\":%.3f,\"requests\":%llu,\"requests_per_s\":%.2f,\"chunks\":%llu,"
           "\"chunks_per_s\":%.2f",
           elapsed, cpu_used, own, (unsigned long long)replies.total, (double)replies.total / elapsed,
           (unsigned long long)chunk_count, (double)chunk_count / elapsed);
    uint64_t done = streaming ? chunk_count : replies.total;
    const char *each = streaming ? "chunk" : "request";
    if (done) printf(",\"cpu_us_per_%s\":%.3f", each, cpu_used * 1e6 / (double)done);
    if (done && beside.count) printf(",\"beside_cpu_us_per_%s\":%.3f", each, beside_used * 1e6 / (double)done);
    print_latency("reply", &replies);
    if (streaming) {
        print_latency("first", &first_bytes);
        print_latency("chunk", &latencies);
    }
}

/* Opens streams up to COUNT of them; how many have had their one chunk when memory had time to settle. */
static int hold(int from, int count) {
    uint64_t deadline = now_ns() + 30 * SECOND;
    int open = 0;
    for (int i = from; i < count; i++) {
        open_connection(&conns[i]);
        start(&conns[i]);
    }
    while (open < count && now_ns() < deadline) {
        turn(20, 0);
        open = 0;
        for (int i = 0; i < count; i++) open += conns[i].busy && conns[i].next_sequence > 0;
    }
    uint64_t settled = now_ns() + (uint64_t)(seconds * 1e9);
    while (now_ns() < settled) turn(20, 0);
    if (open < count) note_error("%d of %d streams opened", open, count);
    return open;
}

/* Streams that have sent one chunk and then say nothing. The first half may live on memory that was free already, so
 * what the second half adds is what a stream costs. */
static void run_idle(void) {
    long none = rss_kib(&watched);
    int half = hold(0, connection_count / 2);
    long some = rss_kib(&watched), beside_some = rss_kib(&beside);
    int open = hold(connection_count / 2, connection_count);
    long all = rss_kib(&watched), beside_all = rss_kib(&beside);
    printf("{\"open\":%d,\"rss_before_kib\":%ld,\"rss_half_kib\":%ld,\"rss_all_kib\":%ld,\"kib_per_stream\":%.3f", open, none,
           some, all, open > half ? (double)(all - some) / (open - half) : 0.0);
    if (beside.count && open > half) printf(",\"beside_kib_per_stream\":%.3f", (double)(beside_all - beside_some) / (open - half));
}

/* Readers that take 20 kB/s each from an upstream that sends all it can. */
static void run_slow(void) {
    long before = rss_kib(&watched), highest = before;
    uint64_t taken = 0, begin = now_ns(), until = begin + (uint64_t)(seconds * 1e9);
    for (int i = 0; i < connection_count; i++) start(&conns[i]);
    while (now_ns() < until) {
        usleep(100000);
        for (int i = 0; i < connection_count; i++) {
            ssize_t n = recv(conns[i].fd, buffer, 2000, 0);
            if (n > 0) {
                taken += (uint64_t)n;
                feed(&conns[i], buffer, (size_t)n, now_ns());
            } else if (n == 0 || errno != EAGAIN) {
                note_error("a slow reader was cut off");
            }
        }
        long rss = rss_kib(&watched);
        if (rss > highest) highest = rss;
    }
    printf("{\"rss_before_kib\":%ld,\"rss_highest_kib\":%ld,\"growth_mib\":%.2f,\"bytes_per_s\":%.0f", before, highest,
           (double)(highest - before) / 1024, (double)taken / seconds);
}

static void watch(struct group *g, const char *pid) {
    if (g->count == MAX_WATCHED) die("load: more than %d processes to watch", MAX_WATCHED);
    g->pids[g->count++] = atoi(pid);
}

static void parse(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (strcmp(name, "--port") == 0) port = atoi(value);
        else if (strcmp(name, "--mode") == 0) mode = value;
        else if (strcmp(name, "--connections") == 0) connection_count = atoi(value);
        else if (strcmp(name, "--chunks") == 0) chunks = strtoull(value, NULL, 10);
        else if (strcmp(name, "--rate") == 0) rate = strtoull(value, NULL, 10);
        else if (strcmp(name, "--seconds") == 0) seconds = atof(value);
        else if (strcmp(name, "--enough") == 0) enough = strtoull(value, NULL, 10);
        else if (strcmp(name, "--warm") == 0) warm = atof(value);
        else if (strcmp(name, "--model") == 0) model = value;
        else if (strcmp(name, "--path") == 0) path = value;
        else if (strcmp(name, "--key") == 0) key = value;
        else if (strcmp(name, "--usage") == 0) usage_expected = (uint64_t)atoi(value);
        else if (strcmp(name, "--cpu") == 0) cpu = atoi(value);
        else if (strcmp(name, "--watch") == 0) watch(&watched, value);
        else if (strcmp(name, "--beside") == 0) watch(&beside, value);
        else die("load: unknown option %s", name);
    }
    if (connection_count < 1 || connection_count > MAX_CONNS) die("load: 1 to %d connections", MAX_CONNS);
    streaming = strcmp(mode, "whole") != 0;
    varied = strcmp(mode, "stream") == 0;
}

int main(int argc, char **argv) {
    parse(argc, argv);
    settle_on_cpu(cpu);
    srand(1);
    poller = epoll_create1(EPOLL_CLOEXEC);
    if (watched.count && rss_kib(&watched) == 0) die("load: none of the processes to watch is there");
    int opens_late = strcmp(mode, "idle") == 0;
    for (int i = 0; i < connection_count && !opens_late; i++) open_connection(&conns[i]);
    if (strcmp(mode, "idle") == 0) run_idle();
    else if (strcmp(mode, "slow") == 0) run_slow();
    else run_window();
    printf(",\"errors\":%llu,\"first_error\":\"%s\"}\n", (unsigned long long)error_count, first_error);
    return 0;
}
