import { createHash } from 'node:crypto';
import { InvalidOptionError } from '../errors';

const MAX_IDENTIFIER_BYTES = 63;

/** The schema that an instance lives in: its quoted name and everything derived from it (lock keys, channel, session names). */
export class Schema {
  /** Quoted, ready to be put before a dot. */
  readonly quoted: string;
  /** First half of every session lock's key: 31 bits, so that it reads the same as int4 and as oid. */
  readonly lockSpace: number;
  readonly channel: string;

  constructor(readonly name: string) {
    Schema.assertValid(name);
    this.quoted = `"${name.replaceAll('"', '""')}"`;
    const hash = createHash('sha256').update(`leasehold:${name}`).digest();
    this.lockSpace = hash.readUInt32BE(0) & 0x7fffffff;
    this.channel = `leasehold_${hash.toString('hex', 4, 12)}`;
  }

  /** The schema behind a name that stands quoted in SQL. */
  static ofQuoted(quoted: string): Schema {
    return new Schema(quoted.slice(1, -1).replaceAll('""', '"'));
  }

  /** Advisory locks other than a worker's session lock, as one 64-bit key (decimal text). */
  lockKey(purpose: 'leader' | 'store' | 'migrate'): string {
    return createHash('sha256').update(`leasehold:${purpose}:${this.name}`).digest().readBigInt64BE(0).toString();
  }

  /** `application_name` of a worker's beat connection; rescue looks for it. Under 63 bytes, else the server cuts it. */
  sessionName(lockNo: number): string {
    return `lh:${this.lockSpace.toString(16)}:${lockNo}`;
  }

  static assertValid(name: string): void {
    const bytes = typeof name === 'string' ? Buffer.byteLength(name) : 0;
    const wrong =
      bytes === 0
        ? 'must be a non-empty string'
        : bytes > MAX_IDENTIFIER_BYTES
          ? `must be at most ${MAX_IDENTIFIER_BYTES} bytes long (it has ${bytes}), PostgreSQL would cut it silently`
          : /[\0$]/.test(name) || !name.isWellFormed()
            ? "must not contain NUL, '$' or lone surrogates"
            : name.startsWith('pg_')
              ? "must not begin with 'pg_', PostgreSQL keeps that for itself"
              : undefined;
    if (wrong) throw new InvalidOptionError(`schema = ${JSON.stringify(name)}: ${wrong}`);
  }
}
