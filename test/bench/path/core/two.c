// SPDX-License-Identifier: Apache-2.0
/*
 * Two processes. The server begins when its socket is there, which it says on
 * a pipe, and is ended by the client, or by the kernel with it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "path.h"

static pid_t server;

/* Returns in the client; the server runs what it is given and ends. */
static void split(int type, void (*run)(int fd, int arg), int arg)
{
	pid_t self = getpid();
	int ready[2], fd;
	clockid_t clock;
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
	if (clock_getcpuclockid(server, &clock))
		die("clock of the server");
	count_in(clock);
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
	int room = 64 << 20, i;

	/* All of them, should this process not get the CPU meanwhile. */
	setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room));
	for (i = 0; i < WARM + count; i++) {
		if (i < WARM || i == WARM + count - 1)
			answer(s);
		else
			get(s, "datagram");
	}
	pause();
}

void two_udp(double *samples, int count)
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
		over(s);
		close(s);
	}
	pause();
}

void two_crr(double *samples, int count)
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

void two_rr(double *samples, int count)
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
	long got = 0;
	int i;

	for (i = 0; i < streams; i++)
		fds[i] = (struct pollfd){ .fd = take(l), .events = POLLIN };
	for (;;) {
		if (poll(fds, streams, -1) < 0)
			die("poll");
		for (i = 0; i < streams; i++) {
			if (!fds[i].revents)
				continue;
			got += some(fds[i].fd);
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

void two_bulk(double *samples, int count)
{
	two_stream(samples, count, 1);
}

void two_bulk8(double *samples, int count)
{
	two_stream(samples, count, STREAMS);
}
