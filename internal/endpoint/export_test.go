package endpoint

// SetStep makes m call f as each step of an operation is done.
func (m *Manager) SetStep(f func(string)) { m.cfg.Step = f }
