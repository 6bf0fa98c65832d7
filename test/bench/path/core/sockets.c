// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/time.h>
#include <unistd.h>

#include "path.h"

static char buf[CHUNK];

int open_in(const char *ns, int type)
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

int serve(int type)
{
	int fd = open_in(server_ns, type), one = 1;

	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(fd, (struct sockaddr *)&local, addr_len))
		die("bind");
	if (type == SOCK_STREAM && listen(fd, 16))
		die("listen");
	return fd;
}

void join(int fd)
{
	if (connect(fd, (struct sockaddr *)&target, addr_len))
		die("connect");
}

void get(int fd, const char *what)
{
	if (recv(fd, buf, SIZE, 0) != SIZE)
		die("receive a %s", what);
}

void put(int fd, const char *what)
{
	if (send(fd, buf, SIZE, 0) != SIZE)
		die("send a %s", what);
}

void nodelay(int fd)
{
	int one = 1;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
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
int client(int type, int port)
{
	struct timeval patience = { .tv_sec = PATIENCE / 1000 };
	int fd = socket(target.ss_family, type | SOCK_CLOEXEC, 0);

	if (fd < 0)
		die("socket");
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	claim(fd, port);
	return fd;
}

/* Takes a datagram and sends it back. */
void answer(int s)
{
	struct sockaddr_storage from;
	socklen_t len = sizeof(from);

	if (recvfrom(s, buf, SIZE, 0, (struct sockaddr *)&from, &len) != SIZE)
		die("receive a datagram");
	if (sendto(s, buf, SIZE, 0, (struct sockaddr *)&from, len) != SIZE)
		die("answer");
}

/* Sends what fits of so many bytes. */
long push(int fd, long bytes)
{
	long n = send(fd, buf, bytes < CHUNK ? bytes : CHUNK, MSG_DONTWAIT);

	if (n < 0 && errno != EAGAIN)
		die("send");
	return n < 0 ? 0 : n;
}

/* What one read takes of what there is. */
long some(int fd)
{
	long n = recv(fd, buf, CHUNK, MSG_DONTWAIT);

	if (n == 0 || (n < 0 && errno != EAGAIN))
		die("receive");
	return n < 0 ? 0 : n;
}

/* Takes all that there is. */
long pull(int fd)
{
	long got = 0, n;

	while ((n = some(fd)) > 0)
		got += n;
	return got;
}

/* The other side has closed. */
void over(int fd)
{
	if (recv(fd, buf, SIZE, 0) != 0)
		die("wait for the end");
}
