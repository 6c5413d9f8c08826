# ddpcheck without torch: reports, comparisons, traces and pages. Its wheel is for images of jobs: see docs/settings.md.
#   docker build -t ddpcheck .
#   docker run --rm -v "$PWD:/work" ddpcheck report

FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir build
COPY . /source
RUN python -m build --wheel --outdir /dist /source

FROM python:3.12-slim
COPY --from=build /dist /dist
RUN pip install --no-cache-dir "$(echo /dist/ddpcheck-*.whl)[prometheus]"
# Run folders are mounted here.
WORKDIR /work
ENTRYPOINT ["ddpcheck"]
CMD ["--help"]
