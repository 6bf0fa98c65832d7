// SPDX-License-Identifier: Apache-2.0
/* One thread, client and server: what the path does runs between two reads of the clock. */
#define _GNU_SOURCE
#include <poll.h>
#include <unistd.h>

#include "path.h"

void udp(double *samples, int count)
{
	int s = serve(SOCK_DGRAM), c = open_in(client_ns, SOCK_DGRAM), i, j;
	long long start;

	join(c);
	/* With answers: a conversation, as far as anybody on the way knows. */
	for (i = 0; i < WARM; i++, operations++) {
		put(c, "datagram");
		answer(s);
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

void first(double *samples, int count)
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

void fill(double *samples, int count)
{
	int s = serve(SOCK_DGRAM), c, i;
	long long start;

	close(open_in(client_ns, SOCK_DGRAM));
	begin();
	for (i = 0; i < count; i++, operations++) {
		start = now(CLOCK_MONOTONIC);
		c = client(SOCK_DGRAM, first_port + i);
		join(c);
		put(c, "datagram");
		answer(s);
		get(c, "answer");
		/* Heard again: now it is a conversation. */
		put(c, "datagram");
		get(s, "datagram");
		close(c);
		samples[i] = now(CLOCK_MONOTONIC) - start;
	}
	end();
}

void crr(double *samples, int count)
{
	int l = serve(SOCK_STREAM), c, s, i;
	long long start;

	/* Clients are opened in one namespace: entering it is not measured. */
	close(open_in(client_ns, SOCK_STREAM));
	for (i = -WARM; i < count; i++, operations++) {
		if (!i)
			begin();
		c = client(SOCK_STREAM, first_port + WARM + i);
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
		over(s);
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

void rr(double *samples, int count)
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

void bulk(double *samples, int count)
{
	stream(samples, count, 1);
}

void bulk8(double *samples, int count)
{
	stream(samples, count, STREAMS);
}
