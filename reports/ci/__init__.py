"""Reports for CI systems: JUnit XML, Markdown and GitHub Actions."""
