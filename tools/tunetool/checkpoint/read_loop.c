/* What is called without Python's lock, so that a thread waits for that once and not once for each read and each copy: a
 * load reads a range of a file that is in memory into the memory of a GPU, through a ring of small pinned slots
 * (read_loop.py); a save fills a buffer from many places (filling.py).
 *
 * Slots can be small, and stay in the processor's cache from the read to the copy. The driver's functions are handed over:
 * nothing is linked but the C library.
 */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define SLOTS 4

/* Bytes [start, stop) of the file or of the buffer, and the address elsewhere, such as on the GPU, of the first of them. */
struct run {
    int64_t start, stop;
    uint64_t there;
};

struct ring {
    uint8_t *memory; /* SLOTS times slot_bytes, pinned */
    int64_t slot_bytes;
    int64_t next; /* the slot that is used next */
    void *stream;
    void *events[SLOTS]; /* of the copies from each slot */
    int (*copy)(uint64_t target, const void *source, size_t count, void *stream);
    int (*record)(void *event, void *stream);
    int (*synchronize)(void *event);
};

/* Changes with the structures and the functions. */
int32_t tunetool_read_loop_version(void) { return 2; }

static int fill(int file, uint8_t *memory, int64_t count, int64_t at) {
    while (count > 0) {
        ssize_t came = pread(file, memory, (size_t)count, at);
        if (came < 0 && errno == EINTR)
            continue;
        if (came <= 0)
            return 1;
        memory += came, at += came, count -= came;
    }
    return 0;
}

/* Queues the copies of all bytes of `runs`, which are ordered by their start and lie in [start, stop). Returns 0, or 1 if a
 * step failed or the file ended before; some copies may be under way then. */
int32_t tunetool_read_loop(struct ring *ring, int32_t file, int64_t start, int64_t stop, const struct run *runs,
                           int64_t count) {
    int64_t first = 0;
    for (int64_t at = start; at < stop;) {
        uint8_t *memory = ring->memory + ring->next * ring->slot_bytes;
        int64_t end = stop - at < ring->slot_bytes ? stop : at + ring->slot_bytes;
        if (ring->synchronize(ring->events[ring->next]) || fill(file, memory, end - at, at))
            return 1;
        for (int64_t number = first; number < count && runs[number].start < end; number++) {
            const struct run *run = &runs[number];
            int64_t low = run->start > at ? run->start : at, high = run->stop < end ? run->stop : end;
            if (low < high && ring->copy(run->there + (uint64_t)(low - run->start), memory + (low - at),
                                         (size_t)(high - low), ring->stream))
                return 1;
        }
        while (first < count && runs[first].stop <= end)
            first++;
        if (ring->record(ring->events[ring->next], ring->stream))
            return 1;
        ring->next = (ring->next + 1) % SLOTS;
        at = end;
    }
    return 0;
}

/* Fills the ranges of `buffer` (ranges of addresses where it is 0) by `copy`, which queues on `stream`; without it, from the memory of this host, and with zeros
 * where a run has no address. Returns 0, or 1 if a copy failed; those before may be under way then. */
int32_t tunetool_copy_runs(int (*copy)(void *target, uint64_t source, size_t count, void *stream), void *stream,
                           uint8_t *buffer, const struct run *runs, int64_t count) {
    for (const struct run *run = runs; run < runs + count; run++) {
        uint8_t *here = (uint8_t *)((uintptr_t)buffer + (uint64_t)run->start);
        size_t size = (size_t)(run->stop - run->start);
        if (copy) {
            if (copy(here, run->there, size, stream))
                return 1;
        } else if (run->there) {
            memcpy(here, (const void *)(uintptr_t)run->there, size);
        } else {
            memset(here, 0, size);
        }
    }
    return 0;
}
