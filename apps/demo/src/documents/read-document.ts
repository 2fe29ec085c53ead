import { createHash } from 'node:crypto';
import { constants } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { NonRetryableError } from '@leasehold/nestjs';

export interface DocumentText {
  text: string;
  encoding: 'utf-8' | 'utf-16' | 'latin1';
  /** Size of the file. */
  bytes: number;
  /** Of what was read. */
  sha256: string;
  /** Only the first {@link MAX_BYTES} were read. */
  truncated: boolean;
}

/** One worker reads several files at once: no single one may fill its memory. */
export const MAX_BYTES = 8 * 1024 * 1024;

/** Reasons that a second attempt will find again. All others (too many open files, a disk that hiccups) are worth a retry. */
const HOPELESS: Record<string, string> = {
  ENOENT: 'there is no such file (any more)',
  ENOTDIR: 'there is no such file (any more)',
  EACCES: 'permission denied',
  EPERM: 'permission denied',
  EISDIR: 'it is a folder',
  ELOOP: 'its symbolic links go round in circles',
  ENAMETOOLONG: 'its name is too long',
  ENXIO: 'it is no ordinary file',
};

/** Reads a file as text. @throws NonRetryableError that says why it is none */
export async function readDocument(path: string): Promise<DocumentText> {
  const { content, bytes } = await readStart(path);
  const truncated = bytes > content.length;
  return {
    ...decode(content, truncated),
    bytes,
    sha256: createHash('sha256').update(content).digest('hex'),
    truncated,
  };
}

async function readStart(path: string): Promise<{ content: Buffer; bytes: number }> {
  let file: FileHandle | undefined;
  try {
    // Non-blocking: what was a file when it was found may be a pipe by now, and opening one would wait for ever.
    file = await open(path, constants.O_RDONLY | constants.O_NONBLOCK);
    const stat = await file.stat();
    if (!stat.isFile()) throw new NonRetryableError('cannot be read: it is no ordinary file');
    const content = Buffer.alloc(Math.min(stat.size, MAX_BYTES));
    let length = 0;
    while (length < content.length) {
      const { bytesRead } = await file.read(content, length, content.length - length);
      if (bytesRead === 0) break;
      length += bytesRead;
    }
    return { content: content.subarray(0, length), bytes: length < content.length ? length : stat.size };
  } catch (error) {
    const why = HOPELESS[(error as NodeJS.ErrnoException).code ?? ''];
    throw why === undefined ? error : new NonRetryableError(`cannot be read: ${why}`, { cause: error });
  } finally {
    await file?.close();
  }
}

function decode(content: Buffer, truncated: boolean): Pick<DocumentText, 'text' | 'encoding'> {
  const wide =
    content[0] === 0xff && content[1] === 0xfe
      ? 'utf-16le'
      : content[0] === 0xfe && content[1] === 0xff
        ? 'utf-16be'
        : undefined;
  if (wide) return { text: new TextDecoder(wide).decode(content), encoding: 'utf-16' };
  const nul = content.indexOf(0);
  if (nul >= 0) throw new NonRetryableError(`is not text: it has a zero byte at offset ${nul}`);
  const controls = controlBytes(content);
  if (controls * 10 > content.length) {
    throw new NonRetryableError(`is not text: ${controls} of ${content.length} bytes are control characters`);
  }
  try {
    // `stream` forgives a character that the limit cut in half.
    return {
      text: new TextDecoder('utf-8', { fatal: true }).decode(content, { stream: truncated }),
      encoding: 'utf-8',
    };
  } catch {
    return { text: new TextDecoder('windows-1252').decode(content), encoding: 'latin1' };
  }
}

function controlBytes(content: Buffer): number {
  let count = 0;
  // Tab, line feed, form feed, carriage return and escape do occur in texts.
  for (const byte of content) if (byte < 32 && (byte < 9 || byte > 13) && byte !== 27) count++;
  return count;
}
