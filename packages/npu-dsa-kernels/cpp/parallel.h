// A team of threads that walks shared loops together. OpenMP, or plain threads for the thread
// sanitizer, which cannot see the synchronisation inside libgomp.
#pragma once

#include <stdint.h>

#ifdef DSA_PLAIN_THREADS

#include <pthread.h>

namespace dsa {

class Team {
  public:
    template <class Body>
    static void run(int threads, Body body) {
        Team team(threads);
        struct Start {
            Team* team;
            Body* body;
            int id;
            pthread_t thread;
        };
        Start starts[kMaxThreads];
        // The lock holds the new threads back until it is known how many there are.
        pthread_mutex_lock(&team.mutex_);
        int started = 1;
        for (; started < team.threads_; started++) {
            starts[started] = {&team, &body, started, {}};
            const int error = pthread_create(
                &starts[started].thread, nullptr,
                [](void* argument) -> void* {
                    auto* start = static_cast<Start*>(argument);
                    pthread_mutex_lock(&start->team->mutex_);
                    pthread_mutex_unlock(&start->team->mutex_);
                    (*start->body)(*start->team, start->id);
                    return nullptr;
                },
                &starts[started]);
            if (error) break;  // the others do the work
        }
        team.threads_ = started;
        pthread_mutex_unlock(&team.mutex_);
        body(team, 0);
        for (int i = 1; i < started; i++) pthread_join(starts[i].thread, nullptr);
    }

    template <class Item>
    void each(int64_t count, Item item) {
        for (;;) {
            pthread_mutex_lock(&mutex_);
            const int64_t i = next_++;
            pthread_mutex_unlock(&mutex_);
            if (i >= count) break;
            item(i);
        }
        barrier();
    }

  private:
    static constexpr int kMaxThreads = 64;

    explicit Team(int threads) : threads_(threads < kMaxThreads ? threads : kMaxThreads) {}

    void barrier() {
        pthread_mutex_lock(&mutex_);
        const int64_t round = round_;
        if (++arrived_ == threads_) {
            arrived_ = 0;
            next_ = 0;
            round_++;
            pthread_cond_broadcast(&all_here_);
        }
        while (round == round_) pthread_cond_wait(&all_here_, &mutex_);
        pthread_mutex_unlock(&mutex_);
    }

    int threads_;
    int arrived_ = 0;
    int64_t next_ = 0;
    int64_t round_ = 0;
    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t all_here_ = PTHREAD_COND_INITIALIZER;
};

}  // namespace dsa

#else

#include <omp.h>

namespace dsa {

class Team {
  public:
    // Calls body(team, thread number) on every thread.
    template <class Body>
    static void run(int threads, Body body) {
#pragma omp parallel num_threads(threads)
        {
            Team team;
            body(team, omp_get_thread_num());
        }
    }

    // Shares out item(0) .. item(count - 1), in any order; returns when all are done. Every thread
    // of the team must call it, with the same count.
    template <class Item>
    void each(int64_t count, Item item) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++) item(i);
    }
};

}  // namespace dsa

#endif
