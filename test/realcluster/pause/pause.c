/* Holds the namespaces of a pod: reaps children, ends when it is told to. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void)
{
	sigset_t set;
	int sig;

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, 0);
	while (sigwait(&set, &sig) == 0 && sig == SIGCHLD)
		while (waitpid(-1, 0, WNOHANG) > 0)
			;
	return 0;
}
