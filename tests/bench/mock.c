/* An upstream that speaks OpenAI's HTTP and costs almost nothing: one epoll loop, fixed replies, one send() per chunk.
 *
 * The request's text chooses what a stream does ("chunks=100 rate=50"), because a body is what every gateway passes on
 * unchanged, while query and headers are not. rate=0 sends the first chunk and then holds the stream open.
 */
#define _GNU_SOURCE
#include "bench.h"

#define MAX_FDS 65536
#define IN_SIZE (64 * 1024)
#define OUT_SIZE 2048
#define SENDS_PER_TURN 512

struct conn {
    int fd;
    int heap_at; /* -1: not in the heap */
    int streaming;
    int wants_usage;
    int watches_out;
    uint64_t sent, chunks, interval, due;
    size_t in_length, out_length;
    char out[OUT_SIZE];
    char in[IN_SIZE];
};

static struct conn *conns[MAX_FDS];
static struct conn *heap[MAX_FDS];
static int heap_size;
static int poller;
static const char *model = "bench";

static char chunk[1200], whole[2048], models[2048];
static size_t chunk_length, whole_length, models_length, chunk_stamp, whole_stamp;
static char ending[1024], ending_with_usage[2048];

static const char stream_head[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    "transfer-encoding: chunked\r\n\r\n";
static const char healthy[] = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n{\"status\":\"ok\"}";
static const char no_length[] = "HTTP/1.1 411 Length Required\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/* Appends one HTTP chunk that holds TEXT. */
static void append_framed(char *to, const char *text) { sprintf(to + strlen(to), "%zx\r\n%s\r\n", strlen(text), text); }

static void build_replies(void) {
    char text[1024];
    const char *id = "chatcmpl-5f0c9a7de1b84c33a2d6";
    snprintf(text, sizeof text,
             "data: {\"id\":\"%s\",\"object\":\"chat.completion.chunk\",\"created\":1764000000,\"model\":\"%s\",\"choices\":"
             "[{\"index\":0,\"delta\":{\"content\":\"" STAMP " word\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n",
             id, model);
    append_framed(chunk, text);
    chunk_length = strlen(chunk);
    chunk_stamp = (size_t)(strchr(chunk, '@') - chunk);

    snprintf(text, sizeof text,
             "data: {\"id\":\"%s\",\"object\":\"chat.completion.chunk\",\"created\":1764000000,\"model\":\"%s\",\"choices\":"
             "[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n",
             id, model);
    append_framed(ending, text);
    strcpy(ending_with_usage, ending);
    snprintf(text, sizeof text,
             "data: {\"id\":\"%s\",\"object\":\"chat.completion.chunk\",\"created\":1764000000,\"model\":\"%s\",\"choices\":[],"
             "\"system_fingerprint\":\"@U\",\"usage\":{\"prompt_tokens\":24,\"completion_tokens\":100,\"total_tokens\":124}}\n\n",
             id, model);
    append_framed(ending_with_usage, text);
    append_framed(ending, "data: [DONE]\n\n");
    append_framed(ending_with_usage, "data: [DONE]\n\n");
    strcat(ending, "0\r\n\r\n");
    strcat(ending_with_usage, "0\r\n\r\n");

    snprintf(text, sizeof text,
             "{\"id\":\"%s\",\"object\":\"chat.completion\",\"created\":1764000000,\"model\":\"%s\",\"choices\":[{\"index\":0,"
             "\"message\":{\"role\":\"assistant\",\"content\":\"" STAMP " The quick brown fox jumps over the lazy dog, and the "
             "dog looks up once and sleeps on.\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],"
             "\"usage\":{\"prompt_tokens\":24,\"completion_tokens\":18,\"total_tokens\":42}}",
             id, model);
    sprintf(whole, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", strlen(text), text);
    whole_length = strlen(whole);
    whole_stamp = (size_t)(strchr(whole, '@') - whole);

    snprintf(text, sizeof text,
             "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":1764000000,\"owned_by\":\"bench\","
             "\"max_model_len\":32768}]}",
             model);
    models_length = (size_t)sprintf(
        models, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", strlen(text), text);
}

static void heap_put(int at, struct conn *c) {
    heap[at] = c;
    c->heap_at = at;
}

static void heap_settle(int at) {
    struct conn *c = heap[at];
    while (at > 0 && heap[(at - 1) / 2]->due > c->due) {
        heap_put(at, heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        int child = 2 * at + 1;
        if (child >= heap_size) break;
        if (child + 1 < heap_size && heap[child + 1]->due < heap[child]->due) child++;
        if (heap[child]->due >= c->due) break;
        heap_put(at, heap[child]);
        at = child;
    }
    heap_put(at, c);
}

static void heap_add(struct conn *c) {
    heap_put(heap_size++, c);
    heap_settle(heap_size - 1);
}

static void heap_remove(struct conn *c) {
    int at = c->heap_at;
    if (at < 0) return;
    c->heap_at = -1;
    struct conn *last = heap[--heap_size];
    if (last == c) return;
    heap_put(at, last);
    heap_settle(at);
}

static void drop(struct conn *c) {
    heap_remove(c);
    conns[c->fd] = NULL;
    close(c->fd);
    free(c);
}

static void watch(struct conn *c, int out) {
    if (c->watches_out == out) return;
    c->watches_out = out;
    struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP | (out ? EPOLLOUT : 0u), .data.fd = c->fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}

/* 0: all of it is with the kernel. 1: the rest waits in `out`. -1: the peer is gone (and so is c). */
static int transmit(struct conn *c, const char *data, size_t length) {
    if (c->out_length == 0) {
        ssize_t n = send(c->fd, data, length, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) {
            drop(c);
            return -1;
        }
        if (n == (ssize_t)length) return 0;
        if (n > 0) {
            data += n;
            length -= (size_t)n;
        }
    }
    if (c->out_length + length > OUT_SIZE) die("mock: out-buffer too small");
    memcpy(c->out + c->out_length, data, length);
    c->out_length += length;
    heap_remove(c);
    watch(c, 1);
    return 1;
}

static int send_chunk(struct conn *c, int with_head) {
    char both[sizeof stream_head + sizeof chunk];
    write_stamp(chunk + chunk_stamp, now_ns(), c->sent);
    c->sent++;
    if (!with_head) return transmit(c, chunk, chunk_length);
    memcpy(both, stream_head, sizeof stream_head - 1);
    memcpy(both + sizeof stream_head - 1, chunk, chunk_length);
    return transmit(c, both, sizeof stream_head - 1 + chunk_length);
}

static int finish_stream(struct conn *c) {
    const char *text = c->wants_usage ? ending_with_usage : ending;
    heap_remove(c);
    c->streaming = 0;
    return transmit(c, text, strlen(text));
}

static uint64_t number_after(const char *body, size_t length, const char *word, uint64_t otherwise) {
    const char *at = memmem(body, length, word, strlen(word));
    return at ? strtoull(at + strlen(word), NULL, 10) : otherwise;
}

static int is_true(const char *body, size_t length, const char *key) {
    const char *at = memmem(body, length, key, strlen(key));
    if (!at) return 0;
    at += strlen(key);
    while (at < body + length && (*at == ' ' || *at == ':')) at++;
    return at < body + length && *at == 't';
}

static int answer_post(struct conn *c, const char *body, size_t length) {
    if (!is_true(body, length, "\"stream\"")) {
        write_stamp(whole + whole_stamp, now_ns(), 0);
        return transmit(c, whole, whole_length);
    }
    uint64_t rate = number_after(body, length, "rate=", 50);
    c->chunks = number_after(body, length, "chunks=", 16);
    c->wants_usage = is_true(body, length, "\"include_usage\"");
    c->interval = rate ? SECOND / rate : 0;
    c->streaming = 1;
    c->sent = 0;
    c->due = now_ns() + c->interval;
    int state = send_chunk(c, 1);
    if (state < 0) return state;
    if (c->sent >= c->chunks) return finish_stream(c);
    if (state == 0 && c->interval) heap_add(c);
    return state;
}

static int answer_get(struct conn *c, const char *head) {
    if (strncmp(head, "GET /v1/models", 14) == 0) return transmit(c, models, models_length);
    return transmit(c, healthy, sizeof healthy - 1);
}

/* Answers every whole request that has come; one stream at a time. -1: c is gone. */
static int answer_all(struct conn *c) {
    size_t used = 0;
    int state = 0;
    while (!c->streaming && c->out_length == 0) {
        char *head = c->in + used;
        size_t available = c->in_length - used;
        char *end = memmem(head, available, "\r\n\r\n", 4);
        if (!end) break;
        size_t head_length = (size_t)(end + 4 - head), body_length = 0;
        if (strncmp(head, "POST", 4) == 0) {
            const char *value = find_header(head, head_length, "content-length");
            if (!value) {
                if (transmit(c, no_length, sizeof no_length - 1) >= 0) drop(c);
                return -1;
            }
            body_length = strtoull(value, NULL, 10);
        }
        if (available < head_length + body_length) break;
        used += head_length + body_length;
        state = head[0] == 'P' ? answer_post(c, head + head_length, body_length) : answer_get(c, head);
        if (state < 0) return -1;
    }
    memmove(c->in, c->in + used, c->in_length - used);
    c->in_length -= used;
    return 0;
}

static void read_from(struct conn *c) {
    if (c->in_length == IN_SIZE) {
        drop(c);
        return;
    }
    ssize_t n = recv(c->fd, c->in + c->in_length, IN_SIZE - c->in_length, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        drop(c);
        return;
    }
    c->in_length += (size_t)n;
    answer_all(c);
}

static void write_rest(struct conn *c) {
    ssize_t n = send(c->fd, c->out, c->out_length, MSG_NOSIGNAL);
    if (n < 0) {
        if (errno != EAGAIN) drop(c);
        return;
    }
    memmove(c->out, c->out + n, c->out_length - (size_t)n);
    c->out_length -= (size_t)n;
    if (c->out_length) return;
    watch(c, 0);
    if (c->streaming && c->sent >= c->chunks) {
        if (finish_stream(c) < 0) return;
    } else if (c->streaming && c->interval && c->heap_at < 0) {
        heap_add(c);
    }
    answer_all(c);
}

static void accept_all(int listener) {
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) return;
        struct conn *c = fd < MAX_FDS ? malloc(sizeof *c) : NULL;
        if (!c) {
            close(fd);
            continue;
        }
        memset(c, 0, offsetof(struct conn, out));
        c->fd = fd;
        c->heap_at = -1;
        conns[fd] = c;
        struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
    }
}

static void send_due(void) {
    uint64_t now = now_ns();
    for (int n = 0; n < SENDS_PER_TURN && heap_size && heap[0]->due <= now; n++) {
        struct conn *c = heap[0];
        int state = send_chunk(c, 0);
        if (state < 0) continue;
        c->due += c->interval;
        if (state == 0 && c->sent >= c->chunks)
            finish_stream(c);
        else if (state == 0)
            heap_settle(0);
    }
}

static int listen_on(const char *host, int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes); /* accepted sockets inherit it */
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, host, &a.sin_addr) != 1) die("mock: %s is no IPv4 address", host);
    if (bind(fd, (struct sockaddr *)&a, sizeof a) != 0) die("mock: port %d: %s", port, strerror(errno));
    listen(fd, 4096);
    return fd;
}

int main(int argc, char **argv) {
    const char *host = "127.0.0.1";
    int port = 0, cpu = -1;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--host") == 0) host = argv[i + 1];
        else if (strcmp(argv[i], "--port") == 0) port = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--model") == 0) model = argv[i + 1];
        else if (strcmp(argv[i], "--cpu") == 0) cpu = atoi(argv[i + 1]);
        else die("mock: unknown option %s", argv[i]);
    }
    if (strlen(model) > 100) die("mock: the model's name is too long");
    settle_on_cpu(cpu);
    build_replies();
    int listener = listen_on(host, port);
    poller = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener}, ready[256];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
    printf("mock: listening on %s:%d\n", host, port);
    fflush(stdout);
    for (;;) {
        struct timespec wait = {0, 0};
        if (heap_size) {
            uint64_t now = now_ns();
            uint64_t left = heap[0]->due > now ? heap[0]->due - now : 0;
            wait.tv_sec = (time_t)(left / SECOND);
            wait.tv_nsec = (long)(left % SECOND);
        }
        int n = epoll_pwait2(poller, ready, 256, heap_size ? &wait : NULL, NULL);
        if (n < 0 && errno != EINTR) die("mock: epoll: %s", strerror(errno));
        for (int i = 0; i < n; i++) {
            int fd = ready[i].data.fd;
            if (fd == listener) {
                accept_all(listener);
                continue;
            }
            struct conn *c = conns[fd];
            if (!c) continue;
            /* A peer that has gone ends its stream at once, as engines do. */
            if (ready[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) {
                drop(c);
                continue;
            }
            if (ready[i].events & EPOLLOUT) write_rest(c);
            if (conns[fd] == c && ready[i].events & EPOLLIN) read_from(c);
        }
        send_due();
    }
}
