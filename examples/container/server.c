/* An HTTP server for one compiled model of one shape; libc is all that it needs.
 *
 *     POST /    the body is the bytes of the input (of all inputs, one after the other); the answer those of the outputs
 *     GET /     answers "ok": the model is loaded
 *
 * Requests are served one after the other, each with all threads of the model. One that takes longer than TIMEOUT
 * seconds to arrive is dropped.
 */
#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include MODEL_HEADER

#define HEADER_BYTES 8192
#define TENSORS 64
#define TIMEOUT 10

static gtco_model* model;
static void *inputs[TENSORS], *outputs[TENSORS];
static int num_inputs, num_outputs;
static volatile sig_atomic_t stopped;

static void stop(int number) {
  (void)number;
  stopped = 1;
}

/* Sends all bytes; 0 if the client is gone. */
static int send_all(int client, const void* data, size_t bytes) {
  for (const char* next = data; bytes;) {
    const ssize_t sent = send(client, next, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return 0;
    next += sent, bytes -= (size_t)sent;
  }
  return 1;
}

static void reply(int client, const char* status, size_t bytes, const char* body) {
  char header[256];
  const int length = snprintf(header, sizeof header, "HTTP/1.1 %s\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n",
                              status, bytes);
  if (send_all(client, header, (size_t)length) && body) send_all(client, body, bytes);
}

static void refuse(int client, const char* why) { reply(client, "400 Bad Request", strlen(why), why); }

/* Takes the next bytes of the body: those that came with the header, then those of the socket. */
static int take(int client, char** ready, size_t* length, char* to, size_t bytes) {
  const size_t first = *length < bytes ? *length : bytes;
  memcpy(to, *ready, first);
  *ready += first, *length -= first, to += first, bytes -= first;
  while (bytes) {
    const ssize_t got = recv(client, to, bytes, 0);
    if (got <= 0) return 0;
    to += got, bytes -= (size_t)got;
  }
  return 1;
}

static size_t bytes_of(const gtco_tensor_info* (*tensor)(const gtco_model*, int), int count) {
  size_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += (size_t)tensor(model, i)->nbytes;
  return bytes;
}

static void serve(int client) {
  char header[HEADER_BYTES + 1], *body = NULL;
  size_t length = 0;
  while (!body) {
    const ssize_t got = length < HEADER_BYTES ? recv(client, header + length, HEADER_BYTES - length, 0) : 0;
    if (got <= 0) return refuse(client, "no end of the header\n");
    header[length += (size_t)got] = 0;
    body = strstr(header, "\r\n\r\n");
  }
  if (!strncmp(header, "GET ", 4)) return reply(client, "200 OK", 3, "ok\n");
  const char* field = strcasestr(header, "\r\nContent-Length:");
  const size_t wanted = bytes_of(gtco_input, num_inputs);
  if (strncmp(header, "POST ", 5) || !field || field > body || strtoull(field + 17, NULL, 10) != wanted) {
    char why[96];
    snprintf(why, sizeof why, "POST the %zu bytes of the inputs, with their Content-Length\n", wanted);
    return refuse(client, why);
  }
  if (strcasestr(header, "\r\nExpect: 100-continue")) send_all(client, "HTTP/1.1 100 Continue\r\n\r\n", 25);
  length -= (size_t)((body += 4) - header);
  for (int i = 0; i < num_inputs; ++i)
    if (!take(client, &body, &length, inputs[i], (size_t)gtco_input(model, i)->nbytes)) return;
  if (gtco_run(model, (const void* const*)inputs, outputs) != GTCO_OK) {
    const char* why = gtco_last_error(model);
    return reply(client, "500 Internal Server Error", strlen(why), why);
  }
  reply(client, "200 OK", bytes_of(gtco_output, num_outputs), NULL);
  for (int i = 0; i < num_outputs; ++i)
    if (!send_all(client, outputs[i], (size_t)gtco_output(model, i)->nbytes)) return;
}

static int allocate(const gtco_tensor_info* info, void** place) {
  if (info->nbytes < 0) fprintf(stderr, "the model has several shapes; this server takes a model of one\n");
  return info->nbytes >= 0 && (*place = aligned_alloc(64, ((size_t)info->nbytes + 64) / 64 * 64));
}

int main(int argc, char** argv) {
  const int port = argc > 1 ? atoi(argv[1]) : 8000, on = 1;
  const struct sigaction action = {.sa_handler = stop};
  sigaction(SIGTERM, &action, NULL);
  sigaction(SIGINT, &action, NULL);
  if (gtco_open(NULL, &model) != GTCO_OK) {
    fprintf(stderr, "cannot open the model: %s\n", gtco_last_error(NULL));
    return 1;
  }
  num_inputs = gtco_num_inputs(model), num_outputs = gtco_num_outputs(model);
  if (num_inputs > TENSORS || num_outputs > TENSORS) return 1;
  for (int i = 0; i < num_inputs; ++i)
    if (!allocate(gtco_input(model, i), &inputs[i])) return 1;
  for (int i = 0; i < num_outputs; ++i)
    if (!allocate(gtco_output(model, i), &outputs[i])) return 1;

  const int server = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  socklen_t size = sizeof address;
  setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(server, (struct sockaddr*)&address, size) || listen(server, 64)) return perror("listen"), 1;
  getsockname(server, (struct sockaddr*)&address, &size);
  printf("listening on port %d, %d threads\n", ntohs(address.sin_port), gtco_num_threads(model));
  fflush(stdout);
  while (!stopped) {
    const int client = accept(server, NULL, NULL);
    const struct timeval patience = {.tv_sec = TIMEOUT};
    if (client < 0) continue;
    setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    serve(client);
    shutdown(client, SHUT_WR);
    char rest[HEADER_BYTES]; /* to close over what was sent too much would take the answer back */
    for (int i = 0; i < 128 && recv(client, rest, sizeof rest, 0) > 0; ++i) continue;
    close(client);
  }
  gtco_close(model);
  return 0;
}
