/* What lowered kernels call, memory in which a wrong access shows, and the runs of a grid. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* MLIR's runtime function for copies between strided memrefs. */

typedef struct {
    int64_t rank;
    int64_t *descriptor; /* allocated, aligned, offset, sizes[rank], strides[rank] */
} unranked;

static void copy(int64_t rank, const int64_t *sizes, const int64_t *from_strides, const char *from,
                 const int64_t *to_strides, char *to, int64_t size)
{
    if (rank == 0) {
        memcpy(to, from, size);
        return;
    }
    if (rank == 1 && *from_strides == 1 && *to_strides == 1) {
        memcpy(to, from, *sizes * size);
        return;
    }
    for (int64_t i = 0; i < *sizes; i++)
        copy(rank - 1, sizes + 1, from_strides + 1, from + i * *from_strides * size,
             to_strides + 1, to + i * *to_strides * size, size);
}

void memrefCopy(int64_t size, const unranked *from, const unranked *to)
{
    int64_t rank = from->rank;
    const int64_t *a = from->descriptor, *b = to->descriptor;
    copy(rank, a + 3, a + 3 + rank, (const char *)a[1] + a[2] * size, b + 3 + rank,
         (char *)b[1] + b[2] * size, size);
}

/* The kernel's own buffers start as NaNs, and as -1: what is read before it is written, shows. */

void *__real_malloc(size_t);

void *__wrap_malloc(size_t size)
{
    void *memory = __real_malloc(size);
    if (memory)
        memset(memory, 0xFF, size);
    return memory;
}

/* Memory between pages that cannot be touched, one block for every tensor. */

enum { MOST = 64 };
static const size_t GUARD = (size_t)1 << 28;

static struct block {
    char *base;
    size_t middle; /* bytes of the pages that can be touched */
    char *data;
    size_t bytes;
    char name[64];
} blocks[MOST];
static int count;

/* `bytes` of memory right behind a guard page, or right before one; what is left of its pages is
 * poisoned. NULL where the system has none left. */
char *guarded(size_t bytes, int before, const char *name)
{
    size_t page = sysconf(_SC_PAGESIZE), middle = (bytes + page - 1) / page * page;
    if (count == MOST)
        return NULL;
    char *base = mmap(NULL, middle + 2 * GUARD, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    if (middle && mprotect(base + GUARD, middle, PROT_READ | PROT_WRITE))
        return NULL;
    memset(base + GUARD, 0xFF, middle);
    struct block *block = &blocks[count++];
    block->base = base;
    block->middle = middle;
    block->data = base + GUARD + (before ? middle - bytes : 0);
    block->bytes = bytes;
    snprintf(block->name, sizeof block->name, "%s", name);
    return block->data;
}

/* The name of the first block whose poison was written on, or NULL. */
const char *spoiled(void)
{
    for (int i = 0; i < count; i++) {
        const unsigned char *at = (unsigned char *)blocks[i].base + GUARD;
        const unsigned char *data = (unsigned char *)blocks[i].data, *end = at + blocks[i].middle;
        for (; at < end; at++) {
            if (at == data && (at += blocks[i].bytes) == end)
                break;
            if (*at != 0xFF)
                return blocks[i].name;
        }
    }
    return NULL;
}

void release(void)
{
    while (count) {
        count--;
        munmap(blocks[count].base, blocks[count].middle + 2 * GUARD);
    }
}

/* Where a wrong access is reported, and how the process then ends. */

enum { TOUCHED = 99 };
static int report_to = 2;

static void touched(int signal, siginfo_t *info, void *context)
{
    (void)context;
    char message[256];
    const char *address = info->si_addr;
    int length = snprintf(message, sizeof message, "signal %d at an address of no tensor", signal);
    for (int i = 0; i < count; i++) {
        const struct block *block = &blocks[i];
        const char *end = block->data + block->bytes;
        if (address < block->base || address >= block->base + block->middle + 2 * GUARD)
            continue;
        if (address < block->data)
            length = snprintf(message, sizeof message, "%s: touched %zu bytes before its start",
                              block->name, (size_t)(block->data - address));
        else
            length = snprintf(message, sizeof message, "%s: touched byte %zu behind its end",
                              block->name, (size_t)(address - end));
    }
    if (write(report_to, message, length) < 0)
        _exit(TOUCHED + 1);
    _exit(TOUCHED);
}

void watch(int descriptor)
{
    struct sigaction action = {0};
    report_to = descriptor;
    action.sa_sigaction = touched;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
}
