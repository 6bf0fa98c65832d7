package firewall

import (
	"bufio"
	"fmt"
	"strings"
)

// hooks of iptables' own chains, and the order of its tables there.
var (
	iptablesHooks      = map[string]string{"PREROUTING": "prerouting", "INPUT": "input", "FORWARD": "forward"}
	iptablesPriorities = map[string]int{"raw": -300, "mangle": -150, "nat": -100, "filter": 0, "security": 50}
)

// IPTables reads what iptables-save prints. program and family ("ip" or "ip6")
// are whose it is.
func IPTables(program, family, text string) (Ruleset, error) {
	var set Ruleset
	table := ""
	chains := make(map[string]*chain)
	in := bufio.NewScanner(strings.NewReader(text))
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		line := strings.TrimSpace(in.Text())
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
			chains = make(map[string]*chain)
		case strings.HasPrefix(line, ":"):
			f := strings.Fields(line[1:])
			if len(f) < 2 {
				return set, fmt.Errorf("%s-save: %q is no chain", program, line)
			}
			c := &chain{
				program: program, family: family, table: table, name: f[0],
				hook: iptablesHooks[f[0]], priority: iptablesPriorities[table], drops: f[1] == "DROP",
			}
			if f[1] == "-" {
				c.hook = ""
			}
			chains[f[0]] = c
			set.chains = append(set.chains, c)
		case strings.HasPrefix(line, "-A "):
			r, name := iptablesRule(line)
			c := chains[name]
			if c == nil {
				return set, fmt.Errorf("%s-save: %q is for a chain that is not there", program, line)
			}
			r.conds = append(r.conds, iptablesConds(&r, Words(line)[2:])...)
			c.rules = append(c.rules, r)
		}
	}
	return set, in.Err()
}

func iptablesRule(line string) (rule, string) {
	w := Words(line)
	if len(w) < 2 {
		return rule{text: line}, ""
	}
	return rule{text: line}, w[1]
}

// iptablesConds are the conditions that a rule's options make; the verdict
// goes into r.
func iptablesConds(r *rule, w []string) (out []cond) {
	negated := false
	add := func(c cond) {
		if negated {
			c = not(c)
		}
		out = append(out, c)
		negated = false
	}
	for i := 0; i < len(w); i++ {
		arg := ""
		if i+1 < len(w) {
			arg = w[i+1]
		}
		switch opt := w[i]; opt {
		case "!":
			negated = true
			continue
		case "-m": // the options that follow say it; --comment says nothing
		case "--comment":
		case "-p":
			add(ofProto(arg))
		case "-s":
			add(within(arg, source))
		case "-d":
			add(within(arg, destination))
		case "-i":
			add(byDevice(arg, "+"))
		case "--dport":
			add(toPort(arg, ":"))
		case "--dports":
			var list []cond
			for _, p := range strings.Split(arg, ",") {
				list = append(list, toPort(p, ":"))
			}
			add(anyOf(list))
		case "--ctstate", "--state":
			add(inState(strings.Split(arg, ",")))
		case "-j", "-g":
			r.do, r.target = iptablesTarget(arg, opt == "-g")
			return out // the rest are options of the target
		default:
			if strings.HasPrefix(opt, "-") {
				add(unknown())
			}
			continue // its argument, if any, is no option
		}
		i++
	}
	return out
}

func iptablesTarget(name string, isGoto bool) (verdict, string) {
	switch name {
	case "ACCEPT":
		return accept, ""
	case "DROP", "REJECT":
		return drop, ""
	case "RETURN":
		return giveBack, ""
	}
	if isGoto {
		return leave, name
	}
	// Of the kernel's other targets none ends a packet's way in these
	// tables; a chain of that name is none of them.
	return jump, name
}

// Words splits a line; what is in quotes is one.
func Words(line string) (out []string) {
	var b strings.Builder
	quoted, any := false, false
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case c == '\\' && quoted && i+1 < len(line):
			i++
			b.WriteByte(line[i])
		case c == '"':
			quoted, any = !quoted, true
		case c == ' ' && !quoted:
			if any || b.Len() > 0 {
				out = append(out, b.String())
			}
			b.Reset()
			any = false
		default:
			b.WriteByte(c)
		}
	}
	if any || b.Len() > 0 {
		out = append(out, b.String())
	}
	return out
}
