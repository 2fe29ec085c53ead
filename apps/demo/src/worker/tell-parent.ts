import type { FromWorker } from './messages';

/** Sends to the parent, which may be gone at any moment; then this process ends by itself. */
export function tellParent(message: FromWorker): void {
  if (process.connected) process.send?.(message, undefined, undefined, () => undefined);
}
