import { QueryTimeoutError } from '../errors';

const codeOf = (error: unknown): string =>
  typeof error === 'object' && error !== null && 'code' in error && typeof error.code === 'string' ? error.code : '';

/** A write conflict: nothing happened, the same statement may be repeated (R19). */
export const isConflict = (error: unknown): boolean => ['40001', '40P01'].includes(codeOf(error));

/** No partition of `finished` covers this moment. A CHECK that was broken has the same code, and its constraint's name. */
export const isPartitionMissing = (error: unknown): boolean =>
  codeOf(error) === '23514' && (error as { constraint?: string }).constraint === undefined;

/** The database ended the statement at one of its time limits: the connection is sound, and nothing was written. */
export const isLimit = (error: unknown): boolean => ['57014', '55P03'].includes(codeOf(error));

/** The server's own word that it did not do it: read-only, or cancelled at its statement's limit. */
export const isRefusal = (error: unknown): boolean => ['25006', '57014'].includes(codeOf(error));

/** Somebody else has a row locked, for longer than the statement waits. Nothing was written. */
export const isLocked = (error: unknown): boolean => codeOf(error) === '55P03';

/** The schema, a table or a function of ours is not there. */
export const isSchemaMissing = (error: unknown): boolean => ['3F000', '42P01', '42883'].includes(codeOf(error));

/**
 * The connection or the server behind it is no longer usable, whatever became of the statement: lost sockets, shutdowns and
 * failovers (08xxx, 57P01-57P05), a former primary that is read-only now (25006), no free connection (53300), our own limit.
 */
export const isConnectionError = (error: unknown): boolean => {
  const code = codeOf(error);
  return (
    error instanceof QueryTimeoutError ||
    /^(08|57P0)/.test(code) ||
    ['25006', '53300', '55000', '57014', 'XX000'].includes(code) ||
    (/^E[A-Z]+$/.test(code) && code !== 'EINVAL') ||
    (code === '' && error instanceof Error && /connection|terminated|timeout|socket/i.test(error.message))
  );
};

/**
 * The statement was refused for what it contained (encoding, size, syntax of a value, or a constraint or trigger that an operator added): one
 * bad row, not a bad moment.
 */
export const isContentError = (error: unknown): boolean =>
  /^(22|23|54|P0)/.test(codeOf(error)) && !isPartitionMissing(error);

export const errorText = (error: unknown): string => {
  if (!(error instanceof Error)) return String(error);
  // An AggregateError (all addresses refused) has an empty message of its own.
  if (error instanceof AggregateError && error.message === '') return error.errors.map(errorText).join('; ');
  const code = codeOf(error);
  return code === '' ? error.message : `${error.message} (${code})`;
};
