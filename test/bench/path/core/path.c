// SPDX-License-Identifier: Apache-2.0
/*
 * Measures one workload over one path. Client and server are one thread with
 * its sockets in two network namespaces: whatever the path does, softirqs
 * included, runs inline between two reads of the clock, so elapsed time is
 * the CPU cost of the whole path. The thread is pinned and real-time, so
 * that nobody comes between.
 *
 *   pw-path-core WORKLOAD CLIENT_NETNS SERVER_NETNS TARGET PORT LISTEN_PORT FIRST_PORT CPU COUNT [SERVER_CPU]
 *
 * Prints one JSON object with quantiles of its samples, in nanoseconds, and
 * the CPU time of an operation:
 *   udp    per datagram, sent and received; a sample is the mean of a batch
 *   first  per first datagram of a flow, sent and received
 *   crr    per connect, request, response and close
 *   rr     per request and response on one connection
 *   bulk   per KiB of one TCP stream; a sample is the mean of a MiB or more.
 *          CPU time of the thread, because a stream may wait for a timer
 *   bulk8  the same over eight streams in turn
 *   fill   per new flow of a datagram, its answer and one more, COUNT flows: to have them
 *
 * two-udp, two-crr, two-rr, two-bulk and two-bulk8 are the same with a server
 * that is a process of its own on SERVER_CPU: samples are what the client
 * waits for (of datagrams: sending them), CPU time is that of both.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "path.h"

const char *client_ns, *server_ns;
struct sockaddr_storage target, local;
socklen_t addr_len;
int first_port, server_cpu;

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void address(const char *text, int port, int listen_port)
{
	struct sockaddr_in6 *t6 = (void *)&target, *l6 = (void *)&local;
	struct sockaddr_in *t4 = (void *)&target, *l4 = (void *)&local;

	if (inet_pton(AF_INET, text, &t4->sin_addr) == 1) {
		t4->sin_family = l4->sin_family = AF_INET;
		t4->sin_port = htons(port);
		l4->sin_port = htons(listen_port);
		addr_len = sizeof(*t4);
	} else if (inet_pton(AF_INET6, text, &t6->sin6_addr) == 1) {
		t6->sin6_family = l6->sin6_family = AF_INET6;
		t6->sin6_port = htons(port);
		l6->sin6_port = htons(listen_port);
		addr_len = sizeof(*t6);
	} else {
		errno = EINVAL;
		die("address %s", text);
	}
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(double *samples, int count);
	} workloads[] = {
		{ "udp", udp },       { "first", first },       { "crr", crr },
		{ "rr", rr },         { "bulk", bulk },         { "bulk8", bulk8 },
		{ "fill", fill },     { "two-udp", two_udp },   { "two-crr", two_crr },
		{ "two-rr", two_rr }, { "two-bulk", two_bulk }, { "two-bulk8", two_bulk8 },
	};
	struct sched_param prio = { .sched_priority = 1 };
	double *samples;
	size_t w;
	int n;

	if (argc != 10 && argc != 11) {
		fprintf(stderr,
			"usage: pw-path-core WORKLOAD CLIENT_NETNS SERVER_NETNS TARGET PORT "
			"LISTEN_PORT FIRST_PORT CPU COUNT [SERVER_CPU]\n");
		return 2;
	}
	client_ns = argv[2];
	server_ns = argv[3];
	address(argv[4], atoi(argv[5]), atoi(argv[6]));
	first_port = atoi(argv[7]);
	n = atoi(argv[9]);
	samples = n > 0 ? calloc(n, sizeof(*samples)) : NULL;
	if (!samples)
		die("count %s", argv[9]);
	server_cpu = atoi(argc == 11 ? argv[10] : argv[8]);
	pin(atoi(argv[8]));
	/* Not beside other tests: the kernel's own work on this CPU would wait. */
	if (!getenv("PW_PATH_MODEST") && sched_setscheduler(0, SCHED_FIFO, &prio))
		die("real-time priority");
	if (mlockall(MCL_CURRENT | MCL_FUTURE))
		die("lock memory");
	for (w = 0; w < sizeof(workloads) / sizeof(*workloads); w++) {
		if (strcmp(argv[1], workloads[w].name))
			continue;
		workloads[w].run(samples, n);
		qsort(samples, n, sizeof(*samples), by_value);
		printf("{\"operations\":%ld,\"min\":%.1f,\"p25\":%.1f,\"p50\":%.1f,\"p75\":%.1f,\"p99\":%.1f,\"cpu\":%.1f}\n",
		       operations, samples[0], samples[n / 4], samples[n / 2], samples[n * 3 / 4],
		       samples[n * 99 / 100], (double)cpu / measured);
		return 0;
	}
	errno = EINVAL;
	die("workload %s", argv[1]);
}
