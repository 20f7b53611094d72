"""Tasks of lm-evaluation-harness for any model: the papers' suite, RULER, our probes, and coverage of the teacher."""
