// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "path.h"

long operations;
long measured;
long long cpu;
static bool two; /* processes */
static clockid_t server_clock;

void die(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	fprintf(stderr, "pw-path-core: ");
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fprintf(stderr, ": %s\n", strerror(errno));
	exit(1);
}

void pin(int number)
{
	cpu_set_t cpus;

	CPU_ZERO(&cpus);
	CPU_SET(number, &cpus);
	if (sched_setaffinity(0, sizeof(cpus), &cpus))
		die("pin to CPU %d", number);
}

long long now(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void count_in(clockid_t server)
{
	two = true;
	server_clock = server;
}

/* CPU time so far: of this thread, and of the server if that is another. */
static long long spent(void)
{
	return now(CLOCK_THREAD_CPUTIME_ID) + (two ? now(server_clock) : 0);
}

void begin(void)
{
	cpu = -spent();
	measured = -operations;
}

void end(void)
{
	cpu += spent();
	measured += operations;
}
