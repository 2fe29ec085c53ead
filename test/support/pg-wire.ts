/** Just enough of PostgreSQL's protocol, version 3, to know who a connection is and when a reply is complete. */

const SSL_REQUEST = 80877103;
const GSS_REQUEST = 80877104;
const PROTOCOL_3 = 3;
const READY_FOR_QUERY = 'Z'.charCodeAt(0);
const HEADER_BYTES = 5;

/** Reads the startup packet of a connection from the bytes that its client sends. */
export class StartupReader {
  /** `undefined` until the packet is read; empty when the connection speaks something else, TLS for instance. */
  parameters: Record<string, string> | undefined;
  /** Whether the server answers the last request with one byte outside the message format. */
  awaitsSingleByte = false;
  private buffer = Buffer.alloc(0);

  push(chunk: Buffer): void {
    if (this.parameters) return;
    this.buffer = Buffer.concat([this.buffer, chunk]);
    while (this.buffer.length >= 8 && this.parameters === undefined) {
      const length = this.buffer.readInt32BE(0);
      const code = this.buffer.readInt32BE(4);
      if (code === SSL_REQUEST || code === GSS_REQUEST) this.awaitsSingleByte = true;
      else if (code >> 16 !== PROTOCOL_3) this.parameters = {};
      else if (this.buffer.length < length) return;
      else this.parameters = parsePairs(this.buffer.subarray(8, length));
      this.buffer = this.buffer.subarray(length);
    }
  }
}

function parsePairs(bytes: Buffer): Record<string, string> {
  const parts = bytes.toString().split('\0');
  const pairs: Record<string, string> = {};
  for (let i = 0; parts[i]; i += 2) pairs[parts[i] ?? ''] = parts[i + 1] ?? '';
  return pairs;
}

/** Follows the messages of the server across the borders of the chunks. */
export class ReplyReader {
  private header = Buffer.alloc(0);
  private bodyLeft = 0;

  /** Whether these bytes end a reply, that is hold a whole or the start of a ReadyForQuery. */
  push(chunk: Buffer): boolean {
    let endsReply = false;
    for (let at = 0; at < chunk.length;) {
      if (this.bodyLeft > 0) {
        const skipped = Math.min(this.bodyLeft, chunk.length - at);
        this.bodyLeft -= skipped;
        at += skipped;
        continue;
      }
      const taken = chunk.subarray(at, at + HEADER_BYTES - this.header.length);
      this.header = Buffer.concat([this.header, taken]);
      at += taken.length;
      if (this.header.length < HEADER_BYTES) break;
      if (this.header[0] === READY_FOR_QUERY) endsReply = true;
      this.bodyLeft = this.header.readInt32BE(1) - 4;
      this.header = Buffer.alloc(0);
    }
    return endsReply;
  }
}
