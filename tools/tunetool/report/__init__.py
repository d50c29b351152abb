"""Records in, pages out: tables for a terminal, HTML, Markdown, CSV, JUnit and Prometheus text. It may import every
room but ``cli``, for the types and names that it prints; it measures nothing and changes nothing."""
