/* NVML's ABI without a GPU, for tests: its GPUs are described by the script in the file $DDPCHECK_TEST_NVML.
 *
 * One directive per line, decimal numbers. A directive that is missing has a neutral default.
 *
 *   devices N             GPUs of the node
 *   links N               active NVLinks of each GPU; GPU 0 and 1 are connected directly, the others to a switch
 *   nvlink START RATE     the counters of each link start at START and grow by RATE KiB per second
 *   bytes_fields 1        provides the fields of NVLink 5, which count bytes, too
 *   pcie START RATE BITS  PCIe counters in bytes; BITS 32 wraps; RATE 0 with BITS 0: not supported
 *   throttle MASK         reasons for throttling, of all GPUs
 *   throttle_gpu GPU MASK MHZ   reasons of one GPU, and its clock
 *   ecc GPU RATE          uncorrected memory errors per second
 *   mig GPU SLICES        a GPU with MIG slices
 *   lost GPU SECONDS      the GPU is lost SECONDS after nvmlInit
 *   fail FUNCTION CODE    the function returns CODE
 *   fail_until FUNCTION CODE CALLS   only its first CALLS calls fail
 *   hang FUNCTION AFTER SECONDS   the function blocks for SECONDS, from AFTER seconds after nvmlInit on
 *   process GPU PID BYTES a process with memory on a GPU
 *   processes FILE        the same, one per line, read at every call
 *   log FILE              appends every call that fails
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
enum { MOST_GPUS = 16, MOST_RULES = 64, MOST_SLICES = 7, SLICE = 1000 };

typedef struct { char busIdLegacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long used; unsigned gpuInstance, computeInstance; } Process;
typedef union { double d; unsigned ui; unsigned long ul; unsigned long long ull; } Value;
typedef struct { unsigned field, scope; int64_t timestamp, latency; unsigned type; int status; Value value; } Field;
/* Handles are numbers: GPU + 1, and for a slice (GPU + 1) * SLICE + slice + 1. */
typedef uintptr_t Device;

static struct {
    unsigned devices, links, slices[MOST_GPUS];
    unsigned long long link_start, link_rate, pcie_start, pcie_rate, throttle;
    int bytes_fields, pcie_bits;
    double lost_after[MOST_GPUS], began;
    char log[512], processes_file[512];
    struct { unsigned long long mask; unsigned clock; } held[MOST_GPUS];
    double ecc_rate[MOST_GPUS], hang_after, hang_seconds;
    char hangs[64];
    struct { char function[64]; int code; int calls; } rules[MOST_RULES];
    int rule_count;
    struct { unsigned gpu; Process process; } processes[MOST_RULES];
    int process_count;
} script;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void add_process(unsigned gpu, unsigned long long pid, unsigned long long bytes) {
    if (script.process_count == MOST_RULES) return;
    script.processes[script.process_count].gpu = gpu;
    script.processes[script.process_count++].process = (Process){(unsigned)pid, bytes, ~0u, ~0u};
}

static void read_line(const char *line) {
    char word[64];
    unsigned long long a, b, c;
    double seconds;
    unsigned gpu;
    int code, calls;
    sscanf(line, "devices %u", &script.devices);
    sscanf(line, "links %u", &script.links);
    sscanf(line, "bytes_fields %d", &script.bytes_fields);
    sscanf(line, "throttle %llu", &script.throttle);
    sscanf(line, "log %511s", script.log);
    if (sscanf(line, "nvlink %llu %llu", &a, &b) == 2) script.link_start = a, script.link_rate = b;
    if (sscanf(line, "pcie %llu %llu %llu", &a, &b, &c) == 3)
        script.pcie_start = a, script.pcie_rate = b, script.pcie_bits = (int)c;
    if (sscanf(line, "mig %u %llu", &gpu, &a) == 2 && gpu < MOST_GPUS) script.slices[gpu] = (unsigned)a;
    if (sscanf(line, "lost %u %lf", &gpu, &seconds) == 2 && gpu < MOST_GPUS) script.lost_after[gpu] = seconds;
    if (sscanf(line, "process %u %llu %llu", &gpu, &a, &b) == 3) add_process(gpu, a, b);
    sscanf(line, "processes %511s", script.processes_file);
    if (sscanf(line, "throttle_gpu %u %llu %llu", &gpu, &a, &b) == 3 && gpu < MOST_GPUS)
        script.held[gpu].mask = a, script.held[gpu].clock = (unsigned)b;
    if (sscanf(line, "ecc %u %lf", &gpu, &seconds) == 2 && gpu < MOST_GPUS) script.ecc_rate[gpu] = seconds;
    sscanf(line, "hang %63s %lf %lf", script.hangs, &script.hang_after, &script.hang_seconds);
    calls = -1;
    if ((sscanf(line, "fail %63s %d", word, &code) == 2 ||
         sscanf(line, "fail_until %63s %d %d", word, &code, &calls) == 3) && script.rule_count < MOST_RULES) {
        strcpy(script.rules[script.rule_count].function, word);
        script.rules[script.rule_count].calls = calls;
        script.rules[script.rule_count++].code = code;
    }
}

static int answer(const char *function, int code) {
    if (code != SUCCESS && script.log[0]) {
        FILE *file = fopen(script.log, "a");
        if (file) {
            fprintf(file, "%s %d\n", function, code);
            fclose(file);
        }
    }
    return code;
}

static int scripted(const char *function) {
    for (int i = 0; i < script.rule_count; i++)
        if (!strcmp(script.rules[i].function, function) && script.rules[i].calls != 0) {
            if (script.rules[i].calls > 0) script.rules[i].calls--;
            return script.rules[i].code;
        }
    return SUCCESS;
}

static void maybe_hang(const char *function) {
    if (strcmp(script.hangs, function) || now() - script.began < script.hang_after) return;
    struct timespec t = {(time_t)script.hang_seconds, 0};
    nanosleep(&t, NULL);
}

static unsigned gpu_of(Device device) { return (unsigned)((device >= SLICE ? device / SLICE : device) - 1); }
static int is_slice(Device device) { return device >= SLICE; }

static int checked(const char *function, Device device) {
    maybe_hang(function);
    double after = script.lost_after[gpu_of(device)];
    if (after > 0 && now() - script.began >= after) return GPU_IS_LOST;
    return scripted(function);
}

/* The first check of each function: the error that the script or the state of the device calls for. */
#define ON(device) do { int code = checked(__func__, device); if (code) return answer(__func__, code); } while (0)
#define NOT_ON_SLICES(device) do { if (is_slice(device)) return answer(__func__, NOT_SUPPORTED); } while (0)

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    memset(&script, 0, sizeof script);
    script.devices = 1;
    const char *path = getenv("DDPCHECK_TEST_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[600];
    while (file && fgets(line, sizeof line, file)) read_line(line);
    if (file) fclose(file);
    script.began = now();
    maybe_hang(__func__);
    return answer(__func__, scripted(__func__));
}

int nvmlShutdown(void) { return answer(__func__, scripted(__func__)); }

const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "an error of the test's NVML"; }

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    snprintf(version, length, "%s", "570.00.00");
    return answer(__func__, scripted(__func__));
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = script.devices;
    return answer(__func__, scripted(__func__));
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    if (index >= script.devices) return answer(__func__, INVALID_ARGUMENT);
    *device = index + 1;
    return answer(__func__, scripted(__func__));
}

int nvmlDeviceGetName(Device device, char *name, unsigned length) {
    ON(device);
    snprintf(name, length, "Test GPU");
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device device, char *uuid, unsigned length) {
    ON(device);
    snprintf(uuid, length, "%s-%04lu", is_slice(device) ? "MIG" : "GPU", (unsigned long)device);
    return SUCCESS;
}

static void fill_bus(Pci *pci, unsigned gpu) {
    memset(pci, 0, sizeof *pci);
    pci->bus = gpu + 1;
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", gpu + 1);
}

int nvmlDeviceGetPciInfo_v3(Device device, Pci *pci) {
    ON(device);
    fill_bus(pci, gpu_of(device));
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    ON(device);
    memory->total = is_slice(device) ? 10ull << 30 : 80ull << 30;
    memory->used = (gpu_of(device) + 1ull) << 30;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device device, Utilization *used) {
    ON(device);
    /* A GPU with MIG slices does not report its utilization as a whole. */
    if (script.slices[gpu_of(device)]) return answer(__func__, NOT_SUPPORTED);
    used->gpu = 50 + gpu_of(device);
    used->memory = 20;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(Device device, unsigned type, unsigned *clock) {
    ON(device);
    unsigned held = script.held[gpu_of(device)].clock;
    *clock = type == 1 ? (held ? held : 1410) : 1593;
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(Device device, unsigned type, unsigned *clock) {
    ON(device);
    *clock = type == 1 ? 1980 : 2619;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned *celsius) {
    (void)sensor;
    ON(device);
    *celsius = 60 + gpu_of(device);
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts) {
    ON(device);
    *milliwatts = 300000;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *reasons) {
    ON(device);
    *reasons = script.throttle | script.held[gpu_of(device)].mask;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *reasons) {
    ON(device);
    *reasons = script.throttle;
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device device, unsigned type, unsigned counter, unsigned long long *count) {
    (void)counter;
    ON(device);
    double seconds = now() - script.began;
    *count = (unsigned long long)(type ? seconds * script.ecc_rate[gpu_of(device)] : 7 + seconds);
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, Process *found) {
    ON(device);
    unsigned room = *count, here = 0, gpu;
    unsigned long long pid, bytes;
    FILE *file = script.processes_file[0] ? fopen(script.processes_file, "r") : NULL;
    if (file) {
        script.process_count = 0;
        while (fscanf(file, "%u %llu %llu", &gpu, &pid, &bytes) == 3) add_process(gpu, pid, bytes);
        fclose(file);
    }
    for (int i = 0; i < script.process_count; i++)
        if (script.processes[i].gpu == gpu_of(device)) {
            if (found && here < room) found[here] = script.processes[i].process;
            here++;
        }
    *count = here;
    return here > room ? INSUFFICIENT_SIZE : SUCCESS; /* not a failure: pynvml asks for the size in this way */
}

static unsigned long long grown(unsigned long long start, unsigned long long rate) {
    return start + (unsigned long long)((now() - script.began) * (double)rate);
}

static int fill_field(Field *field) {
    unsigned id = field->field;
    field->type = 3;
    if (id == 138 || id == 139) {
        if (field->scope >= script.links) return INVALID_ARGUMENT;
        field->value.ull = grown(script.link_start, script.link_rate);
    } else if ((id == 202 || id == 204) && script.bytes_fields) {
        field->value.ull = grown(script.link_start, script.link_rate * 1024);
    } else if ((id == 197 || id == 198) && script.pcie_bits) {
        unsigned long long bytes = grown(script.pcie_start, script.pcie_rate);
        field->value.ull = bytes;
        if (script.pcie_bits == 32) field->type = 1, field->value.ull = 0, field->value.ui = (unsigned)bytes;
    } else {
        return NOT_SUPPORTED;
    }
    return SUCCESS;
}

int nvmlDeviceGetFieldValues(Device device, int count, Field *fields) {
    ON(device);
    for (int i = 0; i < count; i++) {
        char name[64];
        fields[i].status = fill_field(&fields[i]);
        snprintf(name, sizeof name, "field%u", fields[i].field);
        answer(name, fields[i].status);
    }
    return SUCCESS;
}

int nvmlDeviceGetPcieThroughput(Device device, unsigned counter, unsigned *kilobytes) {
    ON(device);
    *kilobytes = counter ? 2000 : 1000;
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkGeneration(Device device, unsigned *generation) { ON(device); *generation = 3; return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkGeneration(Device device, unsigned *generation) { ON(device); *generation = 5; return SUCCESS; }
int nvmlDeviceGetCurrPcieLinkWidth(Device device, unsigned *width) { ON(device); *width = 8; return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkWidth(Device device, unsigned *width) { ON(device); *width = 16; return SUCCESS; }

int nvmlDeviceGetTopologyCommonAncestor(Device one, Device other, unsigned *level) {
    ON(one);
    *level = gpu_of(one) / 2 == gpu_of(other) / 2 ? 10 : 50;
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(Device one, Device other, unsigned what, unsigned *status) {
    ON(one);
    int close = gpu_of(one) / 2 == gpu_of(other) / 2;
    *status = what == 2 ? (script.links ? 0 : 5) : (close || script.links ? 0 : 5);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned *active) {
    ON(device);
    NOT_ON_SLICES(device);
    if (!script.links) return answer(__func__, NOT_SUPPORTED);
    if (link >= 18) return answer(__func__, INVALID_ARGUMENT);
    *active = link < script.links;
    return SUCCESS;
}

static int faces_a_gpu(Device device) { return gpu_of(device) < 2; }

int nvmlDeviceGetNvLinkRemoteDeviceType(Device device, unsigned link, unsigned *type) {
    (void)link;
    ON(device);
    *type = faces_a_gpu(device) ? 0 : 2;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, unsigned link, Pci *pci) {
    (void)link;
    ON(device);
    fill_bus(pci, faces_a_gpu(device) ? 1 - gpu_of(device) : 100);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    ON(device);
    *current = *pending = script.slices[gpu_of(device)] > 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned *count) {
    ON(device);
    *count = MOST_SLICES;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned index, Device *slice) {
    ON(device);
    if (index >= script.slices[gpu_of(device)]) return answer(__func__, NOT_FOUND);
    *slice = device * SLICE + index + 1;
    return SUCCESS;
}
