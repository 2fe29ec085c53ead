/** What went wrong, for a program; the message says what to do about it. */
export type EmbeddedPostgresErrorCode =
  | 'PLATFORM_UNSUPPORTED'
  | 'PLATFORM_PACKAGE_MISSING'
  | 'BINARIES_UNUSABLE'
  | 'NO_UNPRIVILEGED_ACCOUNT'
  | 'ACCOUNT_UNKNOWN'
  | 'DATA_DIR_NOT_EMPTY'
  | 'DATA_DIR_OWNER'
  | 'DATA_DIR_UNREACHABLE'
  | 'DATA_DIR_VERSION'
  | 'DATA_DIR_IN_USE'
  | 'INITDB_FAILED'
  | 'START_FAILED'
  | 'STOP_FAILED'
  | 'PORT_TAKEN'
  | 'GUARD_FAILED'
  | 'STOPPED';

/** Every failure of this package. */
export class EmbeddedPostgresError extends Error {
  override readonly name = 'EmbeddedPostgresError';

  constructor(
    readonly code: EmbeddedPostgresErrorCode,
    message: string,
    options?: ErrorOptions,
  ) {
    super(message, options);
  }
}

/** The `code` of a system error (`ENOENT`), whichever realm the error comes from. */
export function errnoOf(error: unknown): string | undefined {
  if (typeof error !== 'object' || error === null || !('code' in error)) return undefined;
  return typeof error.code === 'string' ? error.code : undefined;
}

/** A readable text of anything thrown. */
export function textOf(error: unknown): string {
  if (typeof error === 'object' && error !== null && 'message' in error) return String(error.message);
  return String(error);
}
