// SPDX-License-Identifier: Apache-2.0
/*
 * Measures one workload over one path. Client and server are one thread with
 * its sockets in two network namespaces: whatever the path does, softirqs
 * included, runs inline between two reads of the clock, so elapsed time is
 * the CPU cost of the whole path. The thread is pinned and real-time, so
 * that nobody comes between.
 *
 *   pw-path-core WORKLOAD CLIENT_NETNS SERVER_NETNS TARGET PORT LISTEN_PORT FIRST_PORT CPU COUNT
 *
 * Prints one JSON object with quantiles of its samples, in nanoseconds:
 *   udp   per datagram, sent and received; a sample is the mean of a batch
 *   crr   per connect, request, response and close
 *   rr    per request and response on one connection
 *   bulk  per KiB of one TCP stream; a sample is the mean of a MiB or more.
 *         CPU time of the thread, because a stream may wait for a timer
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SIZE 64       /* of a datagram, a request, a response */
#define BATCH 50      /* datagrams of a sample */
#define WARM 50       /* operations before the first sample */
#define CHUNK (64 << 10)
#define SAMPLE (4 << 20) /* bytes of a sample of a stream */
#define PATIENCE 2000 /* ms that anything may take */

static char buf[CHUNK];
static const char *client_ns, *server_ns;
static struct sockaddr_storage target, local;
static socklen_t addr_len;
static int first_port; /* of the clients that connect many times */
static long operations; /* with those before the first sample */

static void die(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	fprintf(stderr, "pw-path-core: ");
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fprintf(stderr, ": %s\n", strerror(errno));
	exit(1);
}

static long long now(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int open_in(const char *ns, int type)
{
	struct timeval patience = { .tv_sec = PATIENCE / 1000 };
	int ns_fd = open(ns, O_RDONLY | O_CLOEXEC), fd;

	if (ns_fd < 0 || setns(ns_fd, CLONE_NEWNET))
		die("network namespace %s", ns);
	close(ns_fd);
	fd = socket(target.ss_family, type | SOCK_CLOEXEC, 0);
	if (fd < 0)
		die("socket in %s", ns);
	/* A packet lost means an error, not a hang. */
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	return fd;
}

static int serve(int type)
{
	int fd = open_in(server_ns, type), one = 1;

	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(fd, (struct sockaddr *)&local, addr_len))
		die("bind");
	if (type == SOCK_STREAM && listen(fd, 16))
		die("listen");
	return fd;
}

static void join(int fd)
{
	if (connect(fd, (struct sockaddr *)&target, addr_len))
		die("connect");
}

static void get(int fd, const char *what)
{
	if (recv(fd, buf, SIZE, 0) != SIZE)
		die("receive a %s", what);
}

static void put(int fd, const char *what)
{
	if (send(fd, buf, SIZE, 0) != SIZE)
		die("send a %s", what);
}

static void nodelay(int fd)
{
	int one = 1;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

static void udp(double *samples, int count)
{
	struct sockaddr_storage from;
	socklen_t len;
	int s = serve(SOCK_DGRAM), c = open_in(client_ns, SOCK_DGRAM), i, j;
	long long start;

	join(c);
	/* With answers: a conversation, as far as anybody on the way knows. */
	for (i = 0; i < WARM; i++, operations++) {
		len = sizeof(from);
		put(c, "datagram");
		if (recvfrom(s, buf, SIZE, 0, (struct sockaddr *)&from, &len) != SIZE)
			die("receive a datagram");
		if (sendto(s, buf, SIZE, 0, (struct sockaddr *)&from, len) != SIZE)
			die("answer");
		get(c, "answer");
	}
	for (i = 0; i < count; i++) {
		start = now(CLOCK_MONOTONIC);
		for (j = 0; j < BATCH; j++)
			put(c, "datagram");
		for (j = 0; j < BATCH; j++)
			get(s, "datagram");
		samples[i] = (double)(now(CLOCK_MONOTONIC) - start) / BATCH;
		operations += BATCH;
	}
}

/*
 * Ports in turn: the kernel's search for a free one, among all that wait for
 * their time to be over, would be the larger part of what is measured.
 */
static void claim(int fd, int port)
{
	struct sockaddr_storage any = local;

	/* The same place in both families. */
	((struct sockaddr_in *)&any)->sin_port = htons(port);
	if (bind(fd, (struct sockaddr *)&any, addr_len))
		die("claim port %d", port);
}

static void crr(double *samples, int count)
{
	int l = serve(SOCK_STREAM), c, s, i;
	long long start;

	/* Clients are opened in one namespace: entering it is not measured. */
	close(open_in(client_ns, SOCK_STREAM));
	for (i = -WARM; i < count; i++, operations++) {
		c = socket(target.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (c < 0)
			die("socket");
		claim(c, first_port + WARM + i);
		start = now(CLOCK_MONOTONIC);
		join(c);
		put(c, "request");
		s = accept4(l, NULL, NULL, SOCK_CLOEXEC);
		if (s < 0)
			die("accept");
		get(s, "request");
		put(s, "response");
		get(c, "response");
		close(c);
		if (recv(s, buf, SIZE, 0) != 0)
			die("wait for the end");
		close(s);
		if (i >= 0)
			samples[i] = now(CLOCK_MONOTONIC) - start;
	}
}

static int pair(int *s)
{
	int l = serve(SOCK_STREAM), c = open_in(client_ns, SOCK_STREAM);

	join(c);
	*s = accept4(l, NULL, NULL, SOCK_CLOEXEC);
	if (*s < 0)
		die("accept");
	nodelay(c);
	nodelay(*s);
	return c;
}

static void rr(double *samples, int count)
{
	int s, c = pair(&s), i;
	long long start;

	for (i = -WARM; i < count; i++, operations++) {
		start = now(CLOCK_MONOTONIC);
		put(c, "request");
		get(s, "request");
		put(s, "response");
		get(c, "response");
		if (i >= 0)
			samples[i] = now(CLOCK_MONOTONIC) - start;
	}
}

static long transfer(int c, int s, long bytes)
{
	struct pollfd fds[2] = { { .fd = c, .events = POLLOUT }, { .fd = s, .events = POLLIN } };
	long got = 0, sent = 0, n, m;

	while (got < bytes) {
		m = 0;
		if (sent < bytes) {
			n = send(c, buf, bytes - sent < CHUNK ? bytes - sent : CHUNK, MSG_DONTWAIT);
			if (n < 0 && errno != EAGAIN)
				die("send");
			if (n > 0)
				sent += n, m += n;
		}
		while ((n = recv(s, buf, CHUNK, MSG_DONTWAIT)) > 0)
			got += n, m += n;
		if (n == 0 || (n < 0 && errno != EAGAIN))
			die("receive");
		fds[0].events = sent < bytes ? POLLOUT : 0;
		if (!m && poll(fds, 2, PATIENCE) <= 0)
			die("the stream stands still");
	}
	return got;
}

static void bulk(double *samples, int count)
{
	int s, c = pair(&s), i;
	long long start;

	for (i = -4; i < count; i++) {
		start = now(CLOCK_THREAD_CPUTIME_ID);
		operations += transfer(c, s, SAMPLE) >> 10;
		if (i >= 0)
			samples[i] = (now(CLOCK_THREAD_CPUTIME_ID) - start) / (SAMPLE / 1024.0);
	}
}

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
	} workloads[] = { { "udp", udp }, { "crr", crr }, { "rr", rr }, { "bulk", bulk } };
	struct sched_param prio = { .sched_priority = 1 };
	cpu_set_t cpus;
	double *samples;
	size_t w;
	int n;

	if (argc != 10) {
		fprintf(stderr, "usage: pw-path-core udp|crr|rr|bulk CLIENT_NETNS SERVER_NETNS "
				"TARGET PORT LISTEN_PORT FIRST_PORT CPU COUNT\n");
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
	CPU_ZERO(&cpus);
	CPU_SET(atoi(argv[8]), &cpus);
	if (sched_setaffinity(0, sizeof(cpus), &cpus))
		die("pin to CPU %s", argv[8]);
	if (sched_setscheduler(0, SCHED_FIFO, &prio))
		die("real-time priority");
	if (mlockall(MCL_CURRENT | MCL_FUTURE))
		die("lock memory");
	for (w = 0; w < sizeof(workloads) / sizeof(*workloads); w++) {
		if (strcmp(argv[1], workloads[w].name))
			continue;
		workloads[w].run(samples, n);
		qsort(samples, n, sizeof(*samples), by_value);
		printf("{\"operations\":%ld,\"min\":%.1f,\"p25\":%.1f,\"p50\":%.1f,\"p75\":%.1f}\n",
		       operations, samples[0], samples[n / 4], samples[n / 2], samples[n * 3 / 4]);
		return 0;
	}
	errno = EINVAL;
	die("workload %s", argv[1]);
}
