/* The copy of hetexp/comm/chunked_copy.py over the chunks of a tensor, in C: the same counters and slots, so that a rank
 * may run either. One call takes a whole tensor, with a thread a channel; the interpreter's lock is not held.
 *
 * Numbers are added in rank order without any rearrangement (no -ffast-math): every rank gets the same bits. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define DONE 0
#define GONE 1    /* a rank is dead or has given up: `lost` says which */
#define LATE 2    /* a rank did not come in time */
#define FAILED 3  /* the device's runtime refused a call: `lost` is its error */
#define LINE 16   /* counters of 4 bytes lie this far apart */
#define LOOK_SECONDS 0.05
#define BLOCK 1024 /* numbers that are added up at a time where there are more than two ranks */

enum { WRITTEN, SUMMED, READ };

struct channel {
    uint32_t *words;      /* [3 * size] counters, LINE apart */
    uint32_t *abandoned;  /* 0, or 1 + the rank that takes no further part */
    char *slots;          /* [size][depth] slots, each of slot_bytes */
    int64_t rank_stride;  /* bytes from one rank's first slot to the next rank's */
    int64_t slot_bytes;
    int32_t rank, size, depth, file;
    int32_t spins;        /* looks at a counter before sleeping */
    int32_t first, every; /* chunks of a tensor that go through this channel: first, first + every, … */
    int32_t lost;
    double timeout_seconds;
};

static double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint32_t *word_of(struct channel *c, int what, int rank) {
    return c->words + (size_t)(what * c->size + rank) * LINE;
}

static int reached(uint32_t *word, uint32_t value) {
    return (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) >= 0;
}

static void wake(uint32_t *word) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#endif
}

static void sleep_on(uint32_t *word, uint32_t value) {
#ifdef __linux__
    struct timespec pause = {0, (long)(LOOK_SECONDS * 1e9)};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &pause, NULL, 0);
#else
    usleep(50);
#endif
}

static int lives(struct channel *c, int rank) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    if (rank == c->rank || fcntl(c->file, F_GETLK, &lock) != 0) return 1;
    return lock.l_type != F_UNLCK;
}

static void publish(struct channel *c, int what, uint32_t value) {
    uint32_t *word = word_of(c, what, c->rank);
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    wake(word);
}

static int await_one(struct channel *c, int what, int rank, uint32_t value) {
    uint32_t *word = word_of(c, what, rank);
    for (int i = 0; i <= c->spins; i++) {
        if (reached(word, value)) return DONE;
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
    }
    double began = now_seconds(), looked = began;
    for (;;) {
        uint32_t seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        if ((int32_t)(seen - value) >= 0) return DONE;
        sleep_on(word, seen);
        if (reached(word, value)) return DONE;
        uint32_t gone = __atomic_load_n(c->abandoned, __ATOMIC_ACQUIRE);
        if (gone) { c->lost = (int32_t)gone - 1; return GONE; }
        double moment = now_seconds();
        if (moment - looked < LOOK_SECONDS) continue;
        looked = moment;
        for (int other = 0; other < c->size; other++)
            if (!lives(c, other)) { c->lost = other; return GONE; }
        if (moment - began > c->timeout_seconds) { c->lost = rank; return LATE; }
    }
}

/* Wait until all other ranks have done this with a chunk. */
static int await(struct channel *c, int what, uint32_t number) {
    for (int rank = 0; rank < c->size; rank++) {
        if (rank == c->rank) continue;
        int status = await_one(c, what, rank, number + 1);
        if (status) return status;
    }
    return DONE;
}

static char *slot_of(struct channel *c, int rank, uint32_t number) {
    return c->slots + rank * c->rank_stride + (int64_t)(number % (uint32_t)c->depth) * c->slot_bytes;
}

#define DEFINE_ADD(NAME, TYPE)                                                                          \
    static void NAME(TYPE *out, TYPE *also, TYPE *const *parts, int size, int64_t count) {              \
        TYPE *one = parts[0], *two = parts[1];                                                          \
        if (size == 2) {                                                                                \
            if (also) for (int64_t i = 0; i < count; i++) { TYPE s = one[i] + two[i]; out[i] = s; also[i] = s; } \
            else for (int64_t i = 0; i < count; i++) out[i] = one[i] + two[i];                          \
            return;                                                                                     \
        }                                                                                               \
        TYPE total[BLOCK];                                                                              \
        for (int64_t start = 0; start < count; start += BLOCK) {                                        \
            int64_t length = count - start < BLOCK ? count - start : BLOCK;                             \
            for (int64_t i = 0; i < length; i++) total[i] = one[start + i] + two[start + i];            \
            for (int rank = 2; rank < size; rank++) {                                                   \
                TYPE *more = parts[rank] + start;                                                       \
                for (int64_t i = 0; i < length; i++) total[i] += more[i];                               \
            }                                                                                           \
            memcpy(out + start, total, (size_t)length * sizeof(TYPE));                                  \
            if (also) memcpy(also + start, total, (size_t)length * sizeof(TYPE));                       \
        }                                                                                               \
    }
DEFINE_ADD(add_float, float)
DEFINE_ADD(add_double, double)

static void add(struct channel *c, char *out, char *also, char *const *parts, int width, int64_t bytes) {
    if (width == 8) add_double((double *)out, (double *)also, (double *const *)parts, c->size, bytes / 8);
    else add_float((float *)out, (float *)also, (float *const *)parts, c->size, bytes / 4);
}

#define MOST_RANKS 1024

/* Number of this channel's chunks of a tensor. */
static int64_t pieces_of(struct channel *c, int64_t count, int64_t chunk) {
    int64_t all = (count + chunk - 1) / chunk;
    return all > c->first ? (all - c->first + c->every - 1) / c->every : 0;
}

/* First number of a piece. */
static int64_t start_of(struct channel *c, int64_t piece, int64_t chunk) {
    return (c->first + piece * c->every) * chunk;
}

static int64_t low(int64_t count, int rank, int size) { return rank * count / size; }

/* Where Python copies, the wait is still this one: it holds no lock of the interpreter. */
int hetexp_await(struct channel *c, int32_t what, uint32_t number) { return await(c, what, number); }

/* Sum this channel's chunks of `count` numbers of `width` bytes in place.
 *
 * chunk: numbers of a chunk. in_parts: whether each rank adds up its part of every chunk, or all of it.
 * number: of the channel's first chunk; the caller counts on by the number of its chunks. */
static int sum(struct channel *c, char *data, int64_t count, int32_t width, int64_t chunk, int32_t in_parts,
               uint32_t number) {
    char *parts[MOST_RANKS];
    int64_t pieces = pieces_of(c, count, chunk);
    int status;
    if (c->size > MOST_RANKS || c->size < 2) return LATE;
    for (int64_t step = 0; step < pieces + (in_parts ? 2 : 1); step++) {
        if (step < pieces) { /* write */
            uint32_t now = number + (uint32_t)step;
            int64_t start = start_of(c, step, chunk), length = count - start < chunk ? count - start : chunk;
            if ((status = await(c, READ, now - (uint32_t)c->depth))) return status;
            char *from = data + start * width, *slot = slot_of(c, c->rank, now);
            if (in_parts) {
                int64_t first = low(length, c->rank, c->size) * width, last = low(length, c->rank + 1, c->size) * width;
                memcpy(slot, from, (size_t)first);
                memcpy(slot + last, from + last, (size_t)(length * width - last));
            } else memcpy(slot, from, (size_t)(length * width));
            publish(c, WRITTEN, now + 1);
        }
        if (step >= 1 && step - 1 < pieces) { /* add */
            uint32_t now = number + (uint32_t)(step - 1);
            int64_t start = start_of(c, step - 1, chunk), length = count - start < chunk ? count - start : chunk;
            if ((status = await(c, WRITTEN, now))) return status;
            char *own = data + start * width;
            int64_t first = in_parts ? low(length, c->rank, c->size) * width : 0;
            int64_t last = in_parts ? low(length, c->rank + 1, c->size) * width : length * width;
            for (int rank = 0; rank < c->size; rank++)
                parts[rank] = (rank == c->rank ? own : slot_of(c, rank, now)) + first;
            add(c, own + first, in_parts ? slot_of(c, c->rank, now) + first : NULL, parts, width, last - first);
            publish(c, in_parts ? SUMMED : READ, now + 1);
        }
        if (in_parts && step >= 2) { /* read the others' parts */
            uint32_t now = number + (uint32_t)(step - 2);
            int64_t start = start_of(c, step - 2, chunk), length = count - start < chunk ? count - start : chunk;
            if ((status = await(c, SUMMED, now))) return status;
            for (int rank = 0; rank < c->size; rank++) {
                if (rank == c->rank) continue;
                int64_t first = low(length, rank, c->size) * width, last = low(length, rank + 1, c->size) * width;
                memcpy(data + start * width + first, slot_of(c, rank, now) + first, (size_t)(last - first));
            }
            publish(c, READ, now + 1);
        }
    }
    return DONE;
}

/* Copy `bytes` of every rank into `everyone` [size], this rank's own excepted. */
static int gather(struct channel *c, char *data, char *const *everyone, int64_t bytes, int64_t chunk,
                  uint32_t number) {
    int64_t pieces = pieces_of(c, bytes, chunk);
    int status;
    for (int64_t step = 0; step < pieces + 1; step++) {
        if (step < pieces) {
            uint32_t now = number + (uint32_t)step;
            int64_t start = start_of(c, step, chunk), length = bytes - start < chunk ? bytes - start : chunk;
            if ((status = await(c, READ, now - (uint32_t)c->depth))) return status;
            memcpy(slot_of(c, c->rank, now), data + start, (size_t)length);
            publish(c, WRITTEN, now + 1);
        }
        if (step >= 1) {
            uint32_t now = number + (uint32_t)(step - 1);
            int64_t start = start_of(c, step - 1, chunk), length = bytes - start < chunk ? bytes - start : chunk;
            if ((status = await(c, WRITTEN, now))) return status;
            for (int rank = 0; rank < c->size; rank++)
                if (rank != c->rank) memcpy(everyone[rank] + start, slot_of(c, rank, now), (size_t)length);
            publish(c, READ, now + 1);
        }
    }
    return DONE;
}

/* ---- Tensors on a device: the runtime copies between it and the page-locked slots, and the host adds up.
 *
 * CUDA's and ROCm's runtimes have these calls alike; their addresses come from the library that torch uses. */

#define TO_DEVICE 1
#define TO_HOST 2
#define MOST_DEPTH 8

struct device {
    int (*set_device)(int);
    int (*copy)(void *, const void *, size_t, int, void *);  /* to, from, bytes, direction, stream */
    int (*record)(void *, void *);                           /* event, stream */
    int (*settle)(void *);                                   /* event: returns once it has happened */
    int (*follow)(void *, void *, unsigned);                 /* stream, event: what comes waits for it */
    void *ready;                                             /* event: the tensor is there */
    void *out, *in;                                          /* streams */
    void *left[MOST_DEPTH], *back[MOST_DEPTH];               /* events of the chunks under way */
    char *scratch;                                           /* page-locked, for a chunk that a rank adds up alone */
    int32_t index;
};

#define TRY(CALL) do { int error = (CALL); if (error) { c->lost = error; return FAILED; } } while (0)

/* Tell that a chunk was read, once its copies are done. */
static int settle_read(struct channel *c, struct device *d, uint32_t number) {
    TRY(d->settle(d->back[number % (uint32_t)c->depth]));
    publish(c, READ, number + 1);
    return DONE;
}

/* As sum, of a tensor at `data` on the device. What comes back follows what left: it needs no wait of its own. */
static int sum_on_device(struct channel *c, struct device *d, char *data, int64_t count, int32_t width,
                         int64_t chunk, int32_t in_parts, uint32_t number) {
    char *parts[MOST_RANKS];
    int64_t pieces = pieces_of(c, count, chunk);
    int status, last_step = in_parts ? 3 : 2;
    if (c->size > MOST_RANKS || c->size < 2 || c->depth > MOST_DEPTH) return LATE;
    TRY(d->set_device(d->index));
    TRY(d->follow(d->out, d->ready, 0));
    for (int64_t step = 0; pieces && step < pieces + last_step; step++) {
        if (step < pieces) { /* write */
            uint32_t now = number + (uint32_t)step;
            int64_t start = start_of(c, step, chunk), length = count - start < chunk ? count - start : chunk;
            if ((status = await(c, READ, now - (uint32_t)c->depth))) return status;
            TRY(d->copy(slot_of(c, c->rank, now), data + start * width, (size_t)(length * width), TO_HOST, d->out));
            TRY(d->record(d->left[now % (uint32_t)c->depth], d->out));
        }
        if (step >= 1 && step - 1 < pieces) { /* add */
            uint32_t now = number + (uint32_t)(step - 1);
            int64_t start = start_of(c, step - 1, chunk), length = count - start < chunk ? count - start : chunk;
            TRY(d->settle(d->left[now % (uint32_t)c->depth]));
            publish(c, WRITTEN, now + 1);
            if ((status = await(c, WRITTEN, now))) return status;
            int64_t first = in_parts ? low(length, c->rank, c->size) * width : 0;
            int64_t last = in_parts ? low(length, c->rank + 1, c->size) * width : length * width;
            for (int rank = 0; rank < c->size; rank++) parts[rank] = slot_of(c, rank, now) + first;
            if (in_parts) {
                add(c, parts[c->rank], NULL, parts, width, last - first);
                publish(c, SUMMED, now + 1);
            } else {
                add(c, d->scratch, NULL, parts, width, last);
                TRY(d->copy(data + start * width, d->scratch, (size_t)last, TO_DEVICE, d->in));
                TRY(d->record(d->back[now % (uint32_t)c->depth], d->in));
                if ((status = settle_read(c, d, now))) return status; /* the scratch is free again */
            }
        }
        if (in_parts && step >= 2 && step - 2 < pieces) { /* read all parts */
            uint32_t now = number + (uint32_t)(step - 2);
            int64_t start = start_of(c, step - 2, chunk), length = count - start < chunk ? count - start : chunk;
            if ((status = await(c, SUMMED, now))) return status;
            for (int rank = 0; rank < c->size; rank++) {
                int64_t first = low(length, rank, c->size) * width, last = low(length, rank + 1, c->size) * width;
                if (last == first) continue;
                TRY(d->copy(data + start * width + first, slot_of(c, rank, now) + first, (size_t)(last - first),
                            TO_DEVICE, d->in));
            }
            TRY(d->record(d->back[now % (uint32_t)c->depth], d->in));
        }
        if (in_parts && step >= 3 && (status = settle_read(c, d, number + (uint32_t)(step - 3)))) return status;
    }
    return DONE;
}

/* As gather, of bytes on the device. */
static int gather_on_device(struct channel *c, struct device *d, char *data, char *const *everyone, int64_t bytes,
                            int64_t chunk, uint32_t number) {
    int64_t pieces = pieces_of(c, bytes, chunk);
    int status;
    if (c->depth > MOST_DEPTH) return LATE;
    TRY(d->set_device(d->index));
    TRY(d->follow(d->out, d->ready, 0));
    for (int64_t step = 0; pieces && step < pieces + 2; step++) {
        if (step < pieces) {
            uint32_t now = number + (uint32_t)step;
            int64_t start = start_of(c, step, chunk), length = bytes - start < chunk ? bytes - start : chunk;
            if ((status = await(c, READ, now - (uint32_t)c->depth))) return status;
            TRY(d->copy(slot_of(c, c->rank, now), data + start, (size_t)length, TO_HOST, d->out));
            TRY(d->record(d->left[now % (uint32_t)c->depth], d->out));
        }
        if (step >= 1 && step - 1 < pieces) {
            uint32_t now = number + (uint32_t)(step - 1);
            int64_t start = start_of(c, step - 1, chunk), length = bytes - start < chunk ? bytes - start : chunk;
            TRY(d->settle(d->left[now % (uint32_t)c->depth]));
            publish(c, WRITTEN, now + 1);
            if ((status = await(c, WRITTEN, now))) return status;
            for (int rank = 0; rank < c->size; rank++)
                if (rank != c->rank)
                    TRY(d->copy(everyone[rank] + start, slot_of(c, rank, now), (size_t)length, TO_DEVICE, d->in));
            TRY(d->record(d->back[now % (uint32_t)c->depth], d->in));
        }
        if (step >= 2 && (status = settle_read(c, d, number + (uint32_t)(step - 2)))) return status;
    }
    return DONE;
}

/* ---- One call for a whole tensor. */

struct call {
    struct channel *channel;
    struct device *device;      /* NULL: the tensor is the host's */
    char *data;
    char *const *everyone;      /* of a gather, where each rank's bytes go; NULL: a sum */
    int64_t count, chunk;       /* numbers of the tensor (bytes of a gather), and of a chunk */
    int32_t width, in_parts;
    uint32_t number;            /* of the channel's first chunk */
    int32_t status;
};

static void *take(void *given) {
    struct call *it = given;
    struct channel *c = it->channel;
    if (it->everyone && it->device)
        it->status = gather_on_device(c, it->device, it->data, it->everyone, it->count, it->chunk, it->number);
    else if (it->everyone)
        it->status = gather(c, it->data, it->everyone, it->count, it->chunk, it->number);
    else if (it->device)
        it->status = sum_on_device(c, it->device, it->data, it->count, it->width, it->chunk, it->in_parts, it->number);
    else
        it->status = sum(c, it->data, it->count, it->width, it->chunk, it->in_parts, it->number);
    return NULL;
}

/* ---- Threads of an exchange, which sleep between its tensors: a new one would meet the device's runtime again. */

struct worker {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct call *job;  /* NULL: nothing to do */
    int ends;
};

struct pool {
    int32_t count;
    struct worker workers[];
};

static void *work(void *given) {
    struct worker *w = given;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (!w->job && !w->ends) pthread_cond_wait(&w->changed, &w->lock);
        if (!w->job) break;
        struct call *job = w->job;
        pthread_mutex_unlock(&w->lock);
        take(job);
        pthread_mutex_lock(&w->lock);
        w->job = NULL;
        pthread_cond_signal(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Return a pool of up to `count` threads; fewer where the system gives no more, and none at all is as good. */
struct pool *hetexp_pool(int32_t count) {
    struct pool *pool = calloc(1, sizeof(struct pool) + (size_t)count * sizeof(struct worker));
    if (!pool) return NULL;
    for (; pool->count < count; pool->count++) {
        struct worker *w = &pool->workers[pool->count];
        pthread_mutex_init(&w->lock, NULL);
        pthread_cond_init(&w->changed, NULL);
        if (pthread_create(&w->thread, NULL, work, w)) break;
    }
    return pool;
}

void hetexp_end_pool(struct pool *pool) {
    if (!pool) return;
    for (int i = 0; i < pool->count; i++) {
        struct worker *w = &pool->workers[i];
        pthread_mutex_lock(&w->lock);
        w->ends = 1;
        pthread_cond_signal(&w->changed);
        pthread_mutex_unlock(&w->lock);
        pthread_join(w->thread, NULL);
        pthread_cond_destroy(&w->changed);
        pthread_mutex_destroy(&w->lock);
    }
    free(pool);
}

/* Take each channel's chunks, all channels at once: the first in this thread, the others in the pool's. */
void hetexp_take(struct pool *pool, struct call *calls, int32_t count) {
    int others = pool ? (pool->count < count - 1 ? pool->count : count - 1) : 0;
    for (int i = 0; i < others; i++) {
        struct worker *w = &pool->workers[i];
        pthread_mutex_lock(&w->lock);
        w->job = &calls[i + 1];
        pthread_cond_signal(&w->changed);
        pthread_mutex_unlock(&w->lock);
    }
    take(&calls[0]);
    for (int i = others + 1; i < count; i++) take(&calls[i]); /* the channels are independent of each other */
    for (int i = 0; i < others; i++) {
        struct worker *w = &pool->workers[i];
        pthread_mutex_lock(&w->lock);
        while (w->job) pthread_cond_wait(&w->changed, &w->lock);
        pthread_mutex_unlock(&w->lock);
    }
}
