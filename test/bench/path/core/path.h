// SPDX-License-Identifier: Apache-2.0
/* What the parts of pw-path-core share. */
#ifndef PATH_H
#define PATH_H

#include <sys/socket.h>
#include <time.h>

#define SIZE 64 /* of a datagram, a request, a response */
#define BATCH 50 /* datagrams of a sample */
#define WARM 50 /* operations before the first sample */
#define CHUNK (64 << 10)
#define SAMPLE (4 << 20) /* bytes of a sample of a stream */
#define STREAMS 8 /* at most */
#define PATIENCE 2000 /* ms that anything may take */

/* What the command line says: path.c. */
extern const char *client_ns, *server_ns;
extern struct sockaddr_storage target, local;
extern socklen_t addr_len;
extern int first_port; /* of the clients that connect many times */
extern int server_cpu;

/* What was measured: measure.c. */
extern long operations; /* with those before the first sample */
extern long measured; /* without them */
extern long long cpu; /* time of those */

__attribute__((noreturn, format(printf, 1, 2))) void die(const char *fmt, ...);
void pin(int number);
long long now(clockid_t clock);
void begin(void);
void end(void);
/* Time of the process that serves counts, too. */
void count_in(clockid_t server);

/* Sockets, and what goes through them: sockets.c. */
int open_in(const char *ns, int type);
int serve(int type);
void join(int fd);
int client(int type, int port);
void nodelay(int fd);
void get(int fd, const char *what);
void put(int fd, const char *what);
void answer(int s);
long push(int fd, long bytes);
long some(int fd);
long pull(int fd);
void over(int fd);

/* Workloads of one thread: one.c. */
void udp(double *samples, int count);
void first(double *samples, int count);
void crr(double *samples, int count);
void rr(double *samples, int count);
void bulk(double *samples, int count);
void bulk8(double *samples, int count);
void fill(double *samples, int count);

/* Those of two processes: two.c. */
void two_udp(double *samples, int count);
void two_crr(double *samples, int count);
void two_rr(double *samples, int count);
void two_bulk(double *samples, int count);
void two_bulk8(double *samples, int count);

#endif
