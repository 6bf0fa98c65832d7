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
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SIZE 64       /* of a datagram, a request, a response */
#define BATCH 50      /* datagrams of a sample */
#define WARM 50       /* operations before the first sample */
#define CHUNK (64 << 10)
#define SAMPLE (4 << 20) /* bytes of a sample of a stream */
#define STREAMS 8     /* at most */
#define PATIENCE 2000 /* ms that anything may take */

static char buf[CHUNK];
static const char *client_ns, *server_ns;
static struct sockaddr_storage target, local;
static socklen_t addr_len;
static int first_port; /* of the clients that connect many times */
static long operations; /* with those before the first sample */
static long measured;   /* without them */
static long long cpu;   /* time of those */
static pid_t server;    /* of two processes */
static clockid_t server_clock;

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

/* CPU time so far: of this thread, and of the server if that is another. */
static long long spent(void)
{
	return now(CLOCK_THREAD_CPUTIME_ID) + (server ? now(server_clock) : 0);
}

static void begin(void)
{
	cpu = -spent();
	measured = -operations;
}

static void end(void)
{
	cpu += spent();
	measured += operations;
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
	begin();
	for (i = 0; i < count; i++) {
		start = now(CLOCK_MONOTONIC);
		for (j = 0; j < BATCH; j++)
			put(c, "datagram");
		for (j = 0; j < BATCH; j++)
			get(s, "datagram");
		samples[i] = (double)(now(CLOCK_MONOTONIC) - start) / BATCH;
		operations += BATCH;
	}
	end();
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

/* A client in the client's namespace, which was entered before. */
static int client(int type, int port)
{
	struct timeval patience = { .tv_sec = PATIENCE / 1000 };
	int fd = socket(target.ss_family, type | SOCK_CLOEXEC, 0);

	if (fd < 0)
		die("socket");
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	claim(fd, port);
	return fd;
}

static void first(double *samples, int count)
{
	int s = serve(SOCK_DGRAM), c, i;
	long long start;

	close(open_in(client_ns, SOCK_DGRAM));
	for (i = -WARM; i < count; i++, operations++) {
		if (!i)
			begin();
		c = client(SOCK_DGRAM, first_port + WARM + i);
		join(c);
		start = now(CLOCK_MONOTONIC);
		put(c, "datagram");
		get(s, "datagram");
		if (i >= 0)
			samples[i] = now(CLOCK_MONOTONIC) - start;
		close(c);
	}
	end();
}

static void fill(double *samples, int count)
{
	struct sockaddr_storage from;
	socklen_t len;
	int s = serve(SOCK_DGRAM), c, i;
	long long start;

	close(open_in(client_ns, SOCK_DGRAM));
	begin();
	for (i = 0; i < count; i++, operations++) {
		start = now(CLOCK_MONOTONIC);
		c = client(SOCK_DGRAM, first_port + i);
		join(c);
		put(c, "datagram");
		len = sizeof(from);
		if (recvfrom(s, buf, SIZE, 0, (struct sockaddr *)&from, &len) != SIZE)
			die("receive a datagram");
		if (sendto(s, buf, SIZE, 0, (struct sockaddr *)&from, len) != SIZE)
			die("answer");
		get(c, "answer");
		/* Heard again: now it is a conversation. */
		put(c, "datagram");
		get(s, "datagram");
		close(c);
		samples[i] = now(CLOCK_MONOTONIC) - start;
	}
	end();
}

static void crr(double *samples, int count)
{
	int l = serve(SOCK_STREAM), c, s, i;
	long long start;

	/* Clients are opened in one namespace: entering it is not measured. */
	close(open_in(client_ns, SOCK_STREAM));
	for (i = -WARM; i < count; i++, operations++) {
		if (!i)
			begin();
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
	end();
}

/* Connections from one thread's client to its server. */
static void pairs(int *c, int *s, int count)
{
	int l = serve(SOCK_STREAM), i;

	for (i = 0; i < count; i++) {
		c[i] = open_in(client_ns, SOCK_STREAM);
		join(c[i]);
		s[i] = accept4(l, NULL, NULL, SOCK_CLOEXEC);
		if (s[i] < 0)
			die("accept");
		nodelay(c[i]);
		nodelay(s[i]);
	}
}

static void rr(double *samples, int count)
{
	int s, c, i;
	long long start;

	pairs(&c, &s, 1);
	for (i = -WARM; i < count; i++, operations++) {
		if (!i)
			begin();
		start = now(CLOCK_MONOTONIC);
		put(c, "request");
		get(s, "request");
		put(s, "response");
		get(c, "response");
		if (i >= 0)
			samples[i] = now(CLOCK_MONOTONIC) - start;
	}
	end();
}

/* Sends what fits of so many bytes. */
static long push(int fd, long bytes)
{
	long n = send(fd, buf, bytes < CHUNK ? bytes : CHUNK, MSG_DONTWAIT);

	if (n < 0 && errno != EAGAIN)
		die("send");
	return n < 0 ? 0 : n;
}

/* Takes what there is. */
static long pull(int fd)
{
	long got = 0, n;

	while ((n = recv(fd, buf, CHUNK, MSG_DONTWAIT)) > 0)
		got += n;
	if (n == 0 || errno != EAGAIN)
		die("receive");
	return got;
}

/* Moves the bytes over as many streams, the same over each. */
static long transfer(const int *c, const int *s, int streams, long bytes)
{
	struct pollfd fds[2 * STREAMS];
	long left[STREAMS], got = 0, n, m;
	int i;

	for (i = 0; i < streams; i++)
		left[i] = bytes / streams;
	while (got < bytes) {
		m = 0;
		for (i = 0; i < streams; i++) {
			n = left[i] ? push(c[i], left[i]) : 0;
			left[i] -= n;
			m += n;
			n = pull(s[i]);
			got += n;
			m += n;
			fds[2 * i] = (struct pollfd){ .fd = c[i], .events = left[i] ? POLLOUT : 0 };
			fds[2 * i + 1] = (struct pollfd){ .fd = s[i], .events = POLLIN };
		}
		if (!m && poll(fds, 2 * streams, PATIENCE) <= 0)
			die("the stream stands still");
	}
	return got;
}

static void stream(double *samples, int count, int streams)
{
	int c[STREAMS], s[STREAMS], i;
	long long start;

	pairs(c, s, streams);
	for (i = -4; i < count; i++) {
		if (!i)
			begin();
		start = now(CLOCK_THREAD_CPUTIME_ID);
		operations += transfer(c, s, streams, SAMPLE) >> 10;
		if (i >= 0)
			samples[i] = (now(CLOCK_THREAD_CPUTIME_ID) - start) / (SAMPLE / 1024.0);
	}
	end();
}

static void bulk(double *samples, int count)
{
	stream(samples, count, 1);
}

static void bulk8(double *samples, int count)
{
	stream(samples, count, STREAMS);
}

/*
 * Two processes. The server begins when its socket is there, which it says on
 * a pipe, and is ended by the client, or by the kernel with it.
 */
static int server_cpu;

static void pin(int number)
{
	cpu_set_t cpus;

	CPU_ZERO(&cpus);
	CPU_SET(number, &cpus);
	if (sched_setaffinity(0, sizeof(cpus), &cpus))
		die("pin to CPU %d", number);
}

/* Returns in the client; the server runs what it is given and ends. */
static void split(int type, void (*run)(int fd, int arg), int arg)
{
	pid_t self = getpid();
	int ready[2], fd;
	char byte = 0;

	if (pipe2(ready, O_CLOEXEC))
		die("pipe");
	server = fork();
	if (server < 0)
		die("fork");
	if (!server) {
		if (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != self)
			exit(1);
		if (mlockall(MCL_CURRENT | MCL_FUTURE))
			die("lock memory");
		pin(server_cpu);
		fd = serve(type);
		if (write(ready[1], &byte, 1) != 1)
			exit(1);
		run(fd, arg);
		exit(0);
	}
	close(ready[1]);
	if (read(ready[0], &byte, 1) != 1)
		die("the server did not begin");
	close(ready[0]);
	if (clock_getcpuclockid(server, &server_clock))
		die("clock of the server");
}

static void finish(void)
{
	end();
	kill(server, SIGKILL);
	waitpid(server, NULL, 0);
}

static int take(int l)
{
	int s = accept4(l, NULL, NULL, SOCK_CLOEXEC);

	if (s < 0)
		die("accept");
	nodelay(s);
	return s;
}

/* Answers as many datagrams, takes the rest, says that it has all. */
static void udp_server(int s, int count)
{
	struct sockaddr_storage from;
	socklen_t len;
	int room = 64 << 20, i;

	/* All of them, should this process not get the CPU meanwhile. */
	setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room));
	for (i = 0; i < WARM + count; i++) {
		len = sizeof(from);
		if (recvfrom(s, buf, SIZE, 0, (struct sockaddr *)&from, &len) != SIZE)
			die("receive a datagram");
		if ((i < WARM || i == WARM + count - 1) &&
		    sendto(s, buf, SIZE, 0, (struct sockaddr *)&from, len) != SIZE)
			die("answer");
	}
	pause();
}

static void two_udp(double *samples, int count)
{
	int c, i, j;
	long long start;

	split(SOCK_DGRAM, udp_server, count * BATCH);
	c = open_in(client_ns, SOCK_DGRAM);
	join(c);
	for (i = 0; i < WARM; i++, operations++) {
		put(c, "datagram");
		get(c, "answer");
	}
	begin();
	for (i = 0; i < count; i++) {
		start = now(CLOCK_MONOTONIC);
		for (j = 0; j < BATCH; j++)
			put(c, "datagram");
		samples[i] = (double)(now(CLOCK_MONOTONIC) - start) / BATCH;
		operations += BATCH;
	}
	get(c, "last answer");
	finish();
}

static void crr_server(int l, int count)
{
	int s, i;

	for (i = 0; i < count; i++) {
		s = take(l);
		get(s, "request");
		put(s, "response");
		if (recv(s, buf, SIZE, 0) != 0)
			die("wait for the end");
		close(s);
	}
	pause();
}

static void two_crr(double *samples, int count)
{
	int c, i;
	long long start;

	split(SOCK_STREAM, crr_server, WARM + count);
	close(open_in(client_ns, SOCK_STREAM));
	for (i = -WARM; i < count; i++, operations++) {
		if (!i)
			begin();
		c = client(SOCK_STREAM, first_port + WARM + i);
		start = now(CLOCK_MONOTONIC);
		join(c);
		put(c, "request");
		get(c, "response");
		close(c);
		if (i >= 0)
			samples[i] = now(CLOCK_MONOTONIC) - start;
	}
	finish();
}

static void rr_server(int l, int count)
{
	int s = take(l), i;

	for (i = 0; i < count; i++) {
		get(s, "request");
		put(s, "response");
	}
	pause();
}

static void two_rr(double *samples, int count)
{
	int c, i;
	long long start;

	split(SOCK_STREAM, rr_server, WARM + count);
	c = open_in(client_ns, SOCK_STREAM);
	join(c);
	nodelay(c);
	for (i = -WARM; i < count; i++, operations++) {
		if (!i)
			begin();
		start = now(CLOCK_MONOTONIC);
		put(c, "request");
		get(c, "response");
		if (i >= 0)
			samples[i] = now(CLOCK_MONOTONIC) - start;
	}
	finish();
}

/* Takes all streams, and says after each sample that it has it. */
static void stream_server(int l, int streams)
{
	struct pollfd fds[STREAMS];
	long got = 0, n;
	int i;

	for (i = 0; i < streams; i++)
		fds[i] = (struct pollfd){ .fd = take(l), .events = POLLIN };
	for (;;) {
		if (poll(fds, streams, -1) < 0)
			die("poll");
		for (i = 0; i < streams; i++) {
			if (!fds[i].revents)
				continue;
			n = recv(fds[i].fd, buf, CHUNK, MSG_DONTWAIT);
			if (n == 0 || (n < 0 && errno != EAGAIN))
				die("receive");
			got += n > 0 ? n : 0;
		}
		if (got >= SAMPLE) {
			got -= SAMPLE;
			put(fds[0].fd, "receipt");
		}
	}
}

static void two_stream(double *samples, int count, int streams)
{
	struct pollfd fds[STREAMS];
	long left[STREAMS], n, m, all;
	long long start;
	int i, j;

	split(SOCK_STREAM, stream_server, streams);
	for (j = 0; j < streams; j++) {
		fds[j].fd = open_in(client_ns, SOCK_STREAM);
		join(fds[j].fd);
		nodelay(fds[j].fd);
	}
	for (i = -4; i < count; i++) {
		if (!i)
			begin();
		start = now(CLOCK_MONOTONIC);
		for (j = 0, all = SAMPLE; j < streams; j++)
			left[j] = SAMPLE / streams;
		while (all) {
			for (j = 0, m = 0; j < streams; j++) {
				n = left[j] ? push(fds[j].fd, left[j]) : 0;
				left[j] -= n;
				m += n;
				fds[j].events = left[j] ? POLLOUT : 0;
			}
			all -= m;
			if (!m && poll(fds, streams, PATIENCE) <= 0)
				die("the stream stands still");
		}
		get(fds[0].fd, "receipt");
		operations += SAMPLE >> 10;
		if (i >= 0)
			samples[i] = (now(CLOCK_MONOTONIC) - start) / (SAMPLE / 1024.0);
	}
	finish();
}

static void two_bulk(double *samples, int count)
{
	two_stream(samples, count, 1);
}

static void two_bulk8(double *samples, int count)
{
	two_stream(samples, count, STREAMS);
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
