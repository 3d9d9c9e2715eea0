/* Keeps one core awake without taking time from anything else: it waits at idle priority, until its parent ends.

   A virtual core that has nothing to do is handed back to the host, and is late to wake up when the host is busy. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

int main(int count, char **words) {
  cpu_set_t cores;
  struct sched_param none = {0};
  if (count != 2) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  CPU_ZERO(&cores);
  CPU_SET(atoi(words[1]), &cores);
  if (sched_setaffinity(0, sizeof cores, &cores) || sched_setscheduler(0, SCHED_IDLE, &none)) return 1;
  for (;;) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }
}
