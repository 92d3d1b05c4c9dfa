/* A libnvidia-ml.so.1 that says what the file named by FAKE_NVML says, which is read again at each count of the cards.
 *
 *     driver 550.54.15
 *     card GPU-a 00000000:3B:00.0 NVIDIA A100-SXM4-40GB
 *     memory 40960 500 30000          (of the last card: total, reserved, free, in MiB)
 *     temperature 41 | utilization 7 | ecc 0 | mig 1
 *     instance MIG-a 4864 1 NVIDIA A100-SXM4-40GB MIG 1g.5gb
 *     link 0 gpu 00000000:86:00.0     (or switch, unknown; "link 0 down")
 *     process 4711 1000 compute       (or graphics, mps; -1 for a size that is not told)
 *     fail nvmlDeviceGetUUID 15       (before the first card: of every call)
 *
 * What the file does not tell is "not supported". A call that the file has a "hang" for waits until <file>.go is there.
 * Each opening and closing is a line in <file>.log. With -DOLD it is a library of the years before memory was told with
 * what the driver keeps, and processes with their instances.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };
enum { CARDS = 16, LINKS = 18, MANY = 16, TEXT = 96 };

struct instance { int used; char uuid[TEXT], name[TEXT]; unsigned long long mib; unsigned slices; };
struct link { int there, active; char kind[16], bus[32]; };
struct process { unsigned pid; long long mib; char kind[16]; };
struct fail { char function[TEXT]; int code; };
struct card {
    char uuid[TEXT], bus[32], name[TEXT];
    unsigned long long total, reserved, free;
    int memory, temperature, utilization, ecc, mig;
    struct instance instances[7];
    struct link links[LINKS];
    struct process processes[MANY];
    struct fail fails[MANY];
    int instance_count, process_count, fail_count;
};

static struct card cards[CARDS];
static struct fail fails[MANY];
static char driver[TEXT], hangs[TEXT];
static int card_count, fail_count;

static void note(const char *what)
{
    char path[1024];
    snprintf(path, sizeof path, "%s.log", getenv("FAKE_NVML"));
    FILE *log = fopen(path, "a");
    fprintf(log, "%s\n", what);
    fclose(log);
}

static void read_file(void)
{
    char line[512];
    memset(cards, 0, sizeof cards);
    card_count = fail_count = 0;
    driver[0] = hangs[0] = 0;
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    while (file && fgets(line, sizeof line, file)) {
        struct card *card = card_count ? &cards[card_count - 1] : NULL;
        struct fail *fail = card ? &card->fails[card->fail_count] : &fails[fail_count];
        struct instance one = {.used = 1};
        struct link link = {.there = 1};
        struct process process;
        unsigned number;
        if (sscanf(line, "driver %95s", driver) == 1 || sscanf(line, "hang %95s", hangs) == 1) continue;
        if (sscanf(line, "fail %95s %d", fail->function, &fail->code) == 2) {
            *(card ? &card->fail_count : &fail_count) += 1;
            continue;
        }
        if (!strncmp(line, "card ", 5)) {
            card = &cards[card_count++];
            card->temperature = card->utilization = card->ecc = card->mig = -1;
            sscanf(line, "card %95s %31s %95[^\n]", card->uuid, card->bus, card->name);
            continue;
        }
        if (!card) continue;
        if (sscanf(line, "memory %llu %llu %llu", &card->total, &card->reserved, &card->free) == 3) card->memory = 1;
        sscanf(line, "temperature %d", &card->temperature);
        sscanf(line, "utilization %d", &card->utilization);
        sscanf(line, "ecc %d", &card->ecc);
        sscanf(line, "mig %d", &card->mig);
        if (sscanf(line, "instance %95s %llu %u %95[^\n]", one.uuid, &one.mib, &one.slices, one.name) == 4)
            card->instances[card->instance_count++] = one;
        if (sscanf(line, "link %u %15s %31s", &number, link.kind, link.bus) >= 2 && number < LINKS) {
            link.active = strcmp(link.kind, "down") != 0;
            card->links[number] = link;
        }
        if (sscanf(line, "process %u %lld %15s", &process.pid, &process.mib, process.kind) == 3)
            card->processes[card->process_count++] = process;
    }
    if (file) fclose(file);
}

static int fails_with(const struct fail *list, int count, const char *function)
{
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i].function, function)) return list[i].code;
    return OK;
}

static int enter(struct card *card, const char *function)
{
    char go[1024];
    snprintf(go, sizeof go, "%s.go", getenv("FAKE_NVML"));
    while (!strcmp(hangs, function) && access(go, F_OK)) usleep(10000);
    int code = fails_with(fails, fail_count, function);
    return code == OK && card ? fails_with(card->fails, card->fail_count, function) : code;
}

#define ENTER(card) do { int code_ = enter(card, __func__); if (code_ != OK) return code_; } while (0)
#define TELL(value, where) do { if ((value) < 0) return NOT_SUPPORTED; *(where) = (value); return OK; } while (0)

static int put(char *where, unsigned size, const char *text)
{
    snprintf(where, size, "%s", text);
    return OK;
}

/* A handle is a card or one of its instances. */
static struct instance *as_instance(void *handle)
{
    for (int i = 0; i < card_count; i++)
        for (int j = 0; j < cards[i].instance_count; j++)
            if (handle == &cards[i].instances[j]) return handle;
    return NULL;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; read_file(); ENTER(NULL); note("open"); return OK; }
int nvmlShutdown(void) { note("close"); return OK; }
const char *nvmlErrorString(int code) { (void)code; return "as the fake says"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { ENTER(NULL); return put(text, size, driver); }

int nvmlDeviceGetCount_v2(unsigned *count) { read_file(); ENTER(NULL); *count = card_count; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    if (index >= (unsigned)card_count) return INVALID;
    ENTER(&cards[index]);
    *handle = &cards[index];
    return OK;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size)
{
    struct instance *instance = as_instance(handle);
    if (instance) return put(text, size, instance->uuid);
    ENTER(handle);
    return put(text, size, ((struct card *)handle)->uuid);
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size)
{
    struct instance *instance = as_instance(handle);
    if (instance) return put(text, size, instance->name);
    ENTER(handle);
    return put(text, size, ((struct card *)handle)->name);
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; };

int nvmlDeviceGetPciInfo_v3(struct card *card, struct pci *pci)
{
    ENTER(card);
    return put(pci->address, sizeof pci->address, card->bus);
}

static const unsigned long long MIB = 1024 * 1024;

struct memory_v1 { unsigned long long total, free, used; };

int nvmlDeviceGetMemoryInfo(struct card *card, struct memory_v1 *memory)
{
    ENTER(card);
    if (!card->memory) return NOT_SUPPORTED;
    *memory = (struct memory_v1){card->total * MIB, card->free * MIB, (card->total - card->free) * MIB};
    return OK;
}

#ifndef OLD
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo_v2(struct card *card, struct memory_v2 *memory)
{
    ENTER(card);
    if (!card->memory) return NOT_SUPPORTED;
    memory->total = card->total * MIB;
    memory->reserved = card->reserved * MIB;
    memory->free = card->free * MIB;
    memory->used = (card->total - card->reserved - card->free) * MIB;
    return OK;
}
#endif

int nvmlDeviceGetTemperature(struct card *card, int sensor, unsigned *degrees)
{
    ENTER(card);
    if (sensor) return INVALID;
    TELL(card->temperature, degrees);
}

int nvmlDeviceGetUtilizationRates(struct card *card, unsigned rates[2])
{
    ENTER(card);
    rates[1] = 0;
    TELL(card->utilization, rates);
}

int nvmlDeviceGetTotalEccErrors(struct card *card, int kind, int counter, unsigned long long *errors)
{
    ENTER(card);
    if (kind != 1 || counter != 0) return INVALID;
    TELL(card->ecc, errors);
}

int nvmlDeviceGetMigMode(struct card *card, unsigned *now, unsigned *after)
{
    ENTER(card);
    *after = 0;
    TELL(card->mig, now);
}

int nvmlDeviceGetMaxMigDeviceCount(struct card *card, unsigned *count) { ENTER(card); *count = 7; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(struct card *card, unsigned index, void **handle)
{
    ENTER(card);
    if (index >= 7 || !card->instances[index].used) return NOT_FOUND;
    *handle = &card->instances[index];
    return OK;
}

struct attributes { unsigned engines[6], slices, compute_slices; unsigned long long mib; };

int nvmlDeviceGetAttributes_v2(void *handle, struct attributes *parts)
{
    struct instance *instance = as_instance(handle);
    if (!instance) return INVALID;
    memset(parts, 0, sizeof *parts);
    parts->slices = parts->compute_slices = instance->slices;
    parts->mib = instance->mib;
    return OK;
}

int nvmlDeviceGetNvLinkState(struct card *card, unsigned link, unsigned *active)
{
    ENTER(card);
    if (link >= LINKS || !card->links[link].there) return INVALID;
    *active = card->links[link].active;
    return OK;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct card *card, unsigned link, struct pci *pci)
{
    ENTER(card);
    return put(pci->address, sizeof pci->address, card->links[link].bus);
}

#ifndef OLD
int nvmlDeviceGetNvLinkRemoteDeviceType(struct card *card, unsigned link, unsigned *kind)
{
    ENTER(card);
    const char *word = card->links[link].kind;
    *kind = !strcmp(word, "gpu") ? 0 : !strcmp(word, "switch") ? 2 : 255;
    return OK;
}
#endif

struct running { unsigned pid; unsigned long long bytes; unsigned instance, compute; };

static int list(struct card *card, const char *kind, unsigned *count, struct running *found)
{
    unsigned room = *count, there = 0;
    for (int i = 0; i < card->process_count; i++) {
        struct process *one = &card->processes[i];
        if (strcmp(one->kind, kind)) continue;
        if (found && there < room)
            found[there] = (struct running){one->pid, one->mib < 0 ? -1ULL : one->mib * MIB, -1U, -1U};
        there++;
    }
    *count = there;
    return there > room ? TOO_SMALL : OK;
}

#define PROCESSES(function, kind) \
    int function(struct card *card, unsigned *count, struct running *found) \
    { ENTER(card); return list(card, kind, count, found); }

#ifdef OLD
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "compute")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics")
#else
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")
#endif
